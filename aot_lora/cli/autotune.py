"""`aot-lora autotune`: what a GPU's autotuner chooses, kept for builds without the GPU."""

from __future__ import annotations

import sys

import click

from aot_lora.cli.options import common, emit, note, read_config
from aot_lora.warmup.autotune import autotune


@click.command()
@common
def command(config: str, store: str | None, form: str, debug: bool) -> None:
    """Record what this host's GPU chooses for the matmuls of CONFIG, in a file beside it.

    `warmup` on a host without the GPU then builds what this one would. Stores no executables.
    """
    del debug
    loaded = read_config(config, store)
    note(f"{len(loaded.plan.variants)} variants; compiling on this host's GPU")
    report = autotune(loaded)
    if form == "json":
        emit(
            {
                "variants": report.variants,
                "results": report.results,
                "seconds": report.seconds,
                "path": str(report.path),
            }
        )
    else:
        print(
            f"{report.results} results for {report.variants} variants in {report.path}, "
            f"{report.seconds:.1f} s"
        )
        print("commit it beside the config: a build and a server both need it")
    sys.stdout.flush()
