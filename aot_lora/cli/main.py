"""The command line. Data on stdout, the rest on stderr; exit codes as in `errors`."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module

import click

from aot_lora import errors

_VERBS = {
    "plan": "What would be compiled: variants, waste, seconds, bytes.",
    "report": "Draw the plan and what of it is compiled as one HTML file.",
    "fit": "Token buckets that pad recorded traffic the least.",
    "warmup": "Compile what is missing into the store.",
    "check": "Compare traces with the lock beside the config.",
    "capture": "Run any program, record what JAX compiles in it, compare with a lock.",
    "inspect": "Show what the store holds for a config, or one artifact.",
    "verify": "Check that the stored artifacts are whole and fit this host.",
    "autotune": "Record what a GPU chooses, for warming up without it.",
    "bench": "Time every form of adapters at a plan's points, and tune its hardware's table.",
    "doctor": "Show what this host compiles for and runs, and its GPU's target config.",
    "adapters": "Show what an adapter holds, and what of it a config would serve.",
}


class _Verbs(click.Group):
    """One module per verb, imported only when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        return import_module(f"aot_lora.cli.{cmd_name}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(_VERBS.items()))


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="aot-lora", prog_name="aot-lora")
def cli() -> None:
    """Recompile-free multi-LoRA serving on XLA.

    Exit codes: 0 ok, 1 internal error, 2 usage or config, 3 check failed, 4 integrity,
    5 unsupported on this host, 130 interrupted.
    """


def run(arguments: list[str]) -> int:
    """Runs the command line and returns its exit code."""
    debug = "--debug" in arguments
    try:
        code = cli.main(args=arguments, prog_name="aot-lora", standalone_mode=False)
        return code if isinstance(code, int) else errors.EXIT_OK
    except click.ClickException as error:
        error.show(sys.stderr)
        return errors.EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted; what is stored stays valid, and the next warmup goes on from there")
        return errors.EXIT_INTERRUPTED
    except errors.AotLoraError as error:
        if debug:
            traceback.print_exc()
        _say(str(error))
        return error.exit_code
    except Exception as error:
        if debug:
            traceback.print_exc()
        _say(
            f"internal error: {type(error).__name__}: {error}\n"
            "  next: run the same command with --debug and report what it prints"
        )
        return errors.EXIT_INTERNAL


def _say(text: str) -> None:
    sys.stderr.write(f"aot-lora: {text}\n")


def main() -> None:
    """Entry point of the ``aot-lora`` script."""
    sys.exit(run(sys.argv[1:]))
