"""Writes PEFT adapters for tests: whole ones, and broken ones (`corrupt_adapters`)."""

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
}
Weights = Mapping[str, tuple[np.ndarray, np.ndarray]]

# Where a decoder's modules are, as in transformers' Llama.
HOMES = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
HOMES |= {"qkv_proj": "self_attn", "query_key_value": "self_attn"}  # and the rest in mlp


def path_of(module: str, layer: int | None) -> str:
    """``model.layers.3.self_attn.q_proj``, or the module itself outside the layers."""
    return module if layer is None else f"model.layers.{layer}.{HOMES.get(module, 'mlp')}.{module}"


def random_pair(
    rng: np.random.Generator, *, rank: int, d: int, o: int
) -> tuple[np.ndarray, np.ndarray]:
    """A [rank, d] and B [o, rank], float32."""
    a, b = rng.standard_normal((rank, d)), rng.standard_normal((o, rank))
    return a.astype(np.float32), b.astype(np.float32)


def random_weights(
    shapes: Mapping[str, tuple[int, int]], *, layers: int, rank: int, seed: int = 0
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Weights of every module of `shapes` (name -> (D, O)) in every layer."""
    rng = np.random.default_rng(seed)
    return {
        path_of(name, layer): random_pair(rng, rank=rank, d=d, o=o)
        for layer in range(layers)
        for name, (d, o) in shapes.items()
    }


def peft_config(weights: Weights, **overrides: Any) -> dict[str, Any]:
    """The config that PEFT would write for `weights`: r is the first pair's rank, alpha as well."""
    rank = next(iter(weights.values()))[0].shape[0] if weights else 8
    return {
        "base_model_name_or_path": "meta-llama/Llama-3.1-8B",
        "bias": "none",
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({path.rpartition(".")[2] for path in weights}),
        "task_type": "CAUSAL_LM",
    } | overrides


def keys_of(path: str, style: str) -> tuple[str, str]:
    """The keys of A and B: ``peft``, ``default`` (with an adapter's name) or ``bare``."""
    prefix, name = {
        "peft": ("base_model.model.", ""),
        "default": ("base_model.model.", ".default"),
        "bare": ("", ""),
    }[style]
    return f"{prefix}{path}.lora_A{name}.weight", f"{prefix}{path}.lora_B{name}.weight"


def write_adapter(
    folder: Path, weights: Weights, *, style: str = "peft", dtype: str = "float32", **config: Any
) -> Path:
    """Writes an adapter.

    Args:
      folder: made if need be.
      weights: path -> (A [r, D], B [O, r]).
      style: of the keys, see `keys_of`.
      dtype: that the weights are cast to.
      config: fields that differ from `peft_config`.
    """
    tensors: dict[str, np.ndarray] = {}
    for path, pair in weights.items():
        tensors |= dict(zip(keys_of(path, style), pair, strict=True))
    write_tensors(folder, {key: cast(array, dtype) for key, array in tensors.items()})
    write_config_file(folder, peft_config(weights, **config))
    return folder


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    known = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}
    return array.astype(known.get(dtype, dtype))


def write_config_file(folder: Path, config: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))


def write_tensors(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).write_bytes(safetensors_bytes(tensors))


def safetensors_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The format, written out: `safetensors.numpy` cannot write bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for key, array in tensors.items():
        end = len(data) + array.nbytes
        header[key] = {
            "dtype": NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), end],
        }
        data += np.ascontiguousarray(array).tobytes()
    return with_header(header, data)


def with_header(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


# --- Broken ones --------------------------------------------------------------------------------

TINY_SHAPES = {"q_proj": (16, 16), "down_proj": (32, 16)}  # of the config in conftest.py
Mutation = Callable[[Path, np.random.Generator], None]


def corrupt_adapters(
    folder: Path,
    seed: int,
    count: int,
    *,
    shapes: Mapping[str, tuple[int, int]] = TINY_SHAPES,
    layers: int = 1,
    rank: int = 4,
) -> Iterator[tuple[str, Path]]:
    """Adapters that are whole but for one thing, each kind in turn.

    Args:
      folder: where they are written, each in a folder of its own.
      seed: of every choice; count: how many.
      shapes, layers, rank: what the adapter would be if it were whole.

    Yields:
      What was done to it, and where it is.
    """
    kinds = list(_MUTATIONS.items())
    for index in range(count):
        rng = np.random.default_rng((seed, index))
        name, mutate = kinds[index % len(kinds)]
        weights = random_weights(shapes, layers=layers, rank=rank, seed=index)
        path = write_adapter(folder / f"{index}-{name}", weights)
        mutate(path, rng)
        yield name, path


def read_parts(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of the weights."""
    raw = (folder / WEIGHTS).read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def edit_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the header in place, or replaces it by what `change` returns."""
    header, data = read_parts(folder)
    changed = change(header)
    (folder / WEIGHTS).write_bytes(with_header(header if changed is None else changed, data))


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    write_config_file(folder, config | fields)


def _entry(header: dict[str, Any], rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
    keys = [key for key in header if key != "__metadata__"]
    key = keys[rng.integers(len(keys))]
    return key, header[key]


def _in_entry(field: str, choose: Callable[[Any, np.random.Generator], Any]) -> Mutation:
    def mutate(folder: Path, rng: np.random.Generator) -> None:
        def change(header: dict[str, Any]) -> None:
            _, entry = _entry(header, rng)
            entry[field] = choose(entry[field], rng)

        edit_header(folder, change)

    return mutate


def _renamed(rename: Callable[[str, np.random.Generator], str]) -> Mutation:
    def mutate(folder: Path, rng: np.random.Generator) -> None:
        def change(header: dict[str, Any]) -> None:
            key, entry = _entry(header, rng)
            del header[key]
            header[rename(key, rng)] = entry

        edit_header(folder, change)

    return mutate


def _in_config(*choices: dict[str, Any]) -> Mutation:
    return lambda folder, rng: edit_config(folder, **choices[rng.integers(len(choices))])


def _config_text(*choices: str) -> Mutation:
    return lambda folder, rng: write_config_file(folder, choices[rng.integers(len(choices))])


def _config_field(text: str) -> str:
    """A config that is whole but for a field written as `text`: JSON has no NaN of its own."""
    return '{"peft_type": "LORA", "lora_alpha": 4, "r": 4, ' + text + "}"


def _weights_bytes(change: Callable[[bytes, np.random.Generator], bytes]) -> Mutation:
    return lambda folder, rng: _rewrite(folder / WEIGHTS, change, rng)


def _config_bytes(change: Callable[[bytes, np.random.Generator], bytes]) -> Mutation:
    return lambda folder, rng: _rewrite(folder / CONFIG, change, rng)


def _rewrite(
    path: Path, change: Callable[[bytes, np.random.Generator], bytes], rng: np.random.Generator
) -> None:
    path.write_bytes(change(path.read_bytes(), rng))


def _cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: rng.integers(len(data))]


def _flip(data: bytes, rng: np.random.Generator, *, first: int, last: int) -> bytes:
    changed = bytearray(data)
    changed[rng.integers(first, last)] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def _flip_in_header(data: bytes, rng: np.random.Generator) -> bytes:
    (size,) = struct.unpack_from("<Q", data)
    return _flip(data, rng, first=8, last=8 + size)


def _not_finite(data: bytes, rng: np.random.Generator) -> bytes:
    (size,) = struct.unpack_from("<Q", data)
    count = (len(data) - 8 - size) // 4
    at = 8 + size + 4 * int(rng.integers(count))
    value = (np.nan, np.inf, -np.inf)[rng.integers(3)]
    return data[:at] + np.float32(value).tobytes() + data[at + 4 :]


def _in_place_of(name: str, make: Callable[[Path], object]) -> Mutation:
    def mutate(folder: Path, rng: np.random.Generator) -> None:
        del rng
        (folder / name).unlink()
        make(folder / name)

    return mutate


def _twice(folder: Path, rng: np.random.Generator) -> None:
    header, data = read_parts(folder)
    key, entry = _entry(header, rng)
    text = json.dumps(header)[:-1] + f", {json.dumps(key)}: {json.dumps(entry)}}}"
    (folder / WEIGHTS).write_bytes(with_header(text.encode(), data))


def _pickled(folder: Path, rng: np.random.Generator) -> None:
    del rng
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def _without(part: str) -> Mutation:
    def mutate(folder: Path, rng: np.random.Generator) -> None:
        header, data = read_parts(folder)
        tensors = {
            key: np.frombuffer(data[slice(*entry["data_offsets"])], np.float32).reshape(
                entry["shape"]
            )
            for key, entry in header.items()
            if key != "__metadata__"
        }
        halves = [key for key in tensors if part in key]
        del tensors[halves[rng.integers(len(halves))]]
        write_tensors(folder, tensors)

    return mutate


_HUGE = 2**62
_REGEXES = ("(a+)+$", "(a|a)*$", "(.*)*x", "(x+x+)+y", "((a?){40}){40}", ".*" * 500 + "q")
_MUTATIONS: dict[str, Mutation] = {
    "weights cut": _weights_bytes(_cut),
    "weights empty": _weights_bytes(lambda data, rng: b""),
    "weights longer": _weights_bytes(lambda data, rng: data + rng.bytes(rng.integers(1, 99))),
    "weights random": _weights_bytes(lambda data, rng: rng.bytes(rng.integers(1, 999))),
    "weights not finite": _weights_bytes(_not_finite),
    "header bit": _weights_bytes(_flip_in_header),
    "header length bit": _weights_bytes(lambda data, rng: _flip(data, rng, first=0, last=8)),
    "header huge": _weights_bytes(lambda data, rng: struct.pack("<Q", _HUGE) + data[8:]),
    "header zero": _weights_bytes(lambda data, rng: bytes(8) + data[8:]),
    "header a list": lambda folder, rng: edit_header(folder, lambda header: [header]),
    "header deep": lambda folder, rng: edit_header(folder, lambda header: b"[" * 90_000),
    "header entry odd": lambda folder, rng: edit_header(
        folder, lambda header: header | {"x.lora_A.weight": (7, None, [], {}, "x")[rng.integers(5)]}
    ),
    "key twice": _twice,
    "shape huge": _in_entry("shape", lambda old, rng: [_HUGE >> int(rng.integers(50)), old[1]]),
    "shape wrong": _in_entry("shape", lambda old, rng: [old[0] + 1, old[1]]),
    "shape swapped": _in_entry("shape", lambda old, rng: old[::-1] if old[0] != old[1] else [1]),
    "shape zero": _in_entry("shape", lambda old, rng: [0, old[1]]),
    "shape negative": _in_entry("shape", lambda old, rng: [-old[0], -old[1]]),
    "shape of three": _in_entry("shape", lambda old, rng: [1, *old]),
    "dtype": _in_entry(
        "dtype", lambda old, rng: ["F64", "I8", "BF16", "F8_E4M3", 7][rng.integers(5)]
    ),
    "offsets huge": _in_entry("data_offsets", lambda old, rng: [old[0] + _HUGE, old[1] + _HUGE]),
    "offsets shifted": _in_entry("data_offsets", lambda old, rng: [old[0] + 4, old[1] + 4]),
    "offsets backwards": _in_entry("data_offsets", lambda old, rng: old[::-1]),
    "offsets negative": _in_entry("data_offsets", lambda old, rng: [-old[1], -old[0]]),
    "name climbs": _renamed(lambda key, rng: f"../../../etc/passwd.{key}"),
    "name absolute": _renamed(lambda key, rng: f"/etc/{key}"),
    "name long": _renamed(lambda key, rng: "a" * 100_000 + key),
    "name controls": _renamed(lambda key, rng: f"\x1b[2J\r\n\0{key}"),
    "name unicode": _renamed(lambda key, rng: f"\u202e\ud83d\ude00{key}"),
    "name surrogate": _renamed(lambda key, rng: f"\ud800{key}"),
    "name of nothing": _renamed(lambda key, rng: key.replace("lora_", "")),
    "layer far": lambda folder, rng: edit_header(
        folder,
        lambda header: {
            key.replace("layers.0", f"layers.{'9' * 300}"): header[key] for key in header
        },
    ),
    "A missing": _without("lora_A"),
    "B missing": _without("lora_B"),
    "config cut": _config_bytes(_cut),
    "config random": _config_bytes(lambda data, rng: rng.bytes(rng.integers(0, 999))),
    "config large": _config_bytes(lambda data, rng: data + b" " * 2**20),
    "config no object": _config_text("[]", "7", "null", '"LORA"', "true"),
    "config deep": _config_text("[" * 100_000, '{"a":' * 100_000),
    "config field": _config_text(
        _config_field('"lora_alpha": NaN'),
        _config_field('"lora_alpha": 1e999'),
        _config_field('"lora_alpha": -Infinity'),
        _config_field('"r": ' + "9" * 5000),
        _config_field('"lora_alpha": 1' + "0" * 400),
        _config_field('"target_modules": ["\\ud800"]'),
    ),
    "rank": _in_config({"r": 0}, {"r": -4}, {"r": 4.5}, {"r": "4"}, {"r": None}, {"r": 5}),
    "alpha": _in_config({"lora_alpha": True}, {"lora_alpha": "4"}, {"lora_alpha": 1e300}),
    "alpha zero": _in_config({"lora_alpha": 0}, {"lora_alpha": 1e-300}, {"lora_alpha": []}),
    "kind": _in_config({"peft_type": "IA3"}, {"use_dora": True}, {"bias": "all"}, {"peft_type": 7}),
    "targets": _in_config({"target_modules": 7}, {"target_modules": []}, {"target_modules": "v"}),
    "regex slow": lambda folder, rng: edit_config(
        folder, target_modules=_REGEXES[rng.integers(len(_REGEXES))]
    ),
    "regex wrong": _in_config({"target_modules": "("}, {"rank_pattern": {"*": 4}}),
    "pattern": _in_config({"rank_pattern": {"q_proj": 8}}, {"alpha_pattern": {"q_proj": None}}),
    "layers": _in_config({"layers_to_transform": [7]}, {"layers_to_transform": "0"}),
    "config missing": lambda folder, rng: (folder / CONFIG).unlink(),
    "config a folder": _in_place_of(CONFIG, Path.mkdir),
    "config a pipe": _in_place_of(CONFIG, os.mkfifo),
    "config to nothing": _in_place_of(CONFIG, lambda path: path.symlink_to("nowhere")),
    "config to itself": _in_place_of(CONFIG, lambda path: path.symlink_to(path)),
    "config a device": _in_place_of(CONFIG, lambda path: path.symlink_to("/dev/zero")),
    "weights missing": lambda folder, rng: (folder / WEIGHTS).unlink(),
    "weights a folder": _in_place_of(WEIGHTS, Path.mkdir),
    "weights a pipe": _in_place_of(WEIGHTS, os.mkfifo),
    "weights to nothing": _in_place_of(WEIGHTS, lambda path: path.symlink_to("nowhere")),
    "weights pickled": _pickled,
}
