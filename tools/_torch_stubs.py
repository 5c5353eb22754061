"""Lets a CUDA build of torch run on a host without CUDA: stand-ins for the libraries it links.

Run by tools/torch_cpu with the interpreter of the venv that has torch. Each stand-in defines the
symbols that torch asks of that library. CUDA counts no device, and what else is asked of it returns
100, cudaErrorNoDevice; other calls, some of which run as libraries load, return a pointer to some
memory.
For tests only. Needs gcc, nm and readelf.
"""

import re
import subprocess
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

LIB = Path(sysconfig.get_path("purelib")) / "torch" / "lib"
# What every Linux host has, whatever torch needs of it.
SYSTEM = re.compile(r"(ld-linux.*|lib(c|m|dl|rt|pthread|util|stdc\+\+|gcc_s|gomp.*))\.so.*")
OURS = re.compile(r"(__)?(cu|nv|nccl)")  # symbols of CUDA's libraries
# What torch and transformers ask even where there is no GPU.
BODIES = {
    "cudaGetDevice": "(int *device) { *device = 0; return 0; }",
    "cudaGetDeviceCount": "(int *count) { *count = 0; return 0; }",
    "cudaStreamIsCapturing": "(void *stream, int *status) { *status = 0; return 0; }",
    "cudaGetErrorString": '(void) { return (long)"no CUDA here"; }',
}


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    libraries = sorted(LIB.glob("*.so*"))
    needed: dict[str, None] = {}
    undefined: dict[str, None] = {}
    defined: set[str] = set()
    for library in libraries:
        needed |= dict.fromkeys(re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-dW", library)))
        for line in output("nm", "-D", library).splitlines():
            *_, kind, symbol = line.split()
            if kind == "U":
                undefined[symbol] = None
            elif kind not in "vw":
                defined.add(symbol.partition("@")[0])
    present = {library.name for library in libraries}
    missing = [name for name in needed if name not in present and not SYSTEM.fullmatch(name)]
    # `symbol@version`, where CUDA's versions bear the name of their library.
    owned: dict[str, dict[str, list[str]]] = {name: defaultdict(list) for name in missing}
    for symbol in undefined:
        name, _, version = symbol.replace("@@", "@").partition("@")
        if name in defined or not OURS.match(name):
            continue
        stem = version.partition(".so")[0]
        home = next((one for one in missing if stem and one.startswith(stem + ".")), "")
        # Without a version any library will do: the loader looks through all of them.
        owned[home or missing[0]][version].append(name)
    for name, versions in owned.items():
        build(name, versions)
    print(f"{len(missing)} stand-ins in {LIB}")


def build(name: str, versions: dict[str, list[str]]) -> None:
    """Compiles one stand-in."""
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stub.c"), Path(folder, "stub.map")
        symbols = [symbol for names in versions.values() for symbol in names]
        lines = ["static char memory[65536];"]
        for symbol in symbols:
            result = "100" if re.match(r"cud?a?[A-Z]", symbol) else "(long)memory"
            body = BODIES.get(symbol, f"(void) {{ return {result}; }}")
            lines.append(f"long {symbol}{body}")
        source.write_text("\n".join(lines) + "\n")
        blocks = [
            f"{version} {{ global: {'; '.join(names)}; }};"
            for version, names in versions.items()
            if version
        ]
        script.write_text("\n".join(blocks) + "\n")
        flags = [f"-Wl,--version-script={script}"] if blocks else []
        command = ["gcc", "-w", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{name}", *flags]
        subprocess.run([*command, "-o", LIB / name, source], check=True)


if __name__ == "__main__":
    main()
