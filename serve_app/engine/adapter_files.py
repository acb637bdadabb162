"""Files of a LoRA adapter: fetched into a directory of this process, and checked against the base model."""

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin

from serve_app.system.hub_errors import explain

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

PREFIX = "base_model.model."
"""Prefix that PEFT gives the names of the base model's layers."""

MAX_BYTES = 16 << 30
"""Most bytes of an adapter."""

MAX_CONFIG_BYTES = 4 << 20
"""Most bytes of its configuration, which is read as a whole."""

MAX_RANK = 1 << 16
"""Largest rank of an adapter, whatever the engine takes."""

MAX_SCALING = 10_000.0
"""Largest factor of a product of two matrices, by `lora_alpha` and rank. Trained adapters have 0.1 to 64."""

MAX_CHANGE = 1e6
"""Largest norm of what an adapter adds to the weights of one layer. Trained adapters have less than 1,000.

With less, no value of an engine with 32 or 16 bits (bfloat16) overflows; float16 ends at 65,504.
"""

FLOAT32 = 3.4028234663852886e38
"""The largest number with 32 bits."""

PAIR = re.compile(r"(.*)\.(lora|lora_embedding)_([AB])(|\.weight)")
"""The name of a matrix: its layer, its kind, which of the two it is, and how the name ends."""

Shapes = Mapping[str, tuple[int, int]]
"""Outputs and inputs of the base model's linear layers, by their names."""


class AdapterError(Exception):
    """An adapter can't be used; the message says why, to the administrator who names it."""


class Adapter(NamedTuple):
    """An adapter in a directory of this process.

    Attributes:
        path: The directory.
        rank: The largest rank of its matrices.
        scaling: The largest factor of a product of its matrices.
    """

    path: Path
    rank: int
    scaling: float


def fetch(location: str, target: Path) -> Adapter:
    """Copy an adapter into a directory, which the source doesn't change and whose files stay.

    Args:
        location: A directory, a Hugging Face id, or a URL that fsspec knows.
        target: The directory; it is made.

    Raises:
        AdapterError: The source can't be read, or isn't an adapter.
    """
    try:
        target.mkdir(parents=True)
        if location.startswith("/"):
            _copy(Path(location), target)
        elif "://" in location:
            _download(location, target)
        else:
            _from_hub(location, target)
    except AdapterError:
        raise
    except Exception as error:
        # Each storage has errors of its own.
        raise AdapterError(f"can't be read: {type(error).__name__}: {error}") from None
    return _described(target)


def _described(path: Path) -> Adapter:
    """Return an adapter as its configuration describes it."""
    try:
        config = json.loads((path / CONFIG).read_text())
        ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
        alphas = [config["lora_alpha"], *(config.get("alpha_pattern") or {}).values()]
        rslora = bool(config.get("use_rslora"))
    except Exception as error:
        # The file may hold anything, such as lists that are nested too deep to be read.
        raise AdapterError(f"{CONFIG} is not that of a LoRA adapter in PEFT's format: {error!r}") from None
    for rank in ranks:
        if type(rank) is not int or not 1 <= rank <= MAX_RANK:
            raise AdapterError(
                f"{CONFIG} is not that of a LoRA adapter in PEFT's format: a rank (r, rank_pattern) is a "
                f"positive integer, not {_short(rank)}"
            )
    for alpha in alphas:
        # JSON has no NaN and no Infinity, but Python reads them.
        if type(alpha) not in (int, float) or not abs(alpha) <= FLOAT32:
            raise AdapterError(
                f"{CONFIG}: lora_alpha (and each value of alpha_pattern) is a finite number, not "
                f"{_short(alpha)}"
            )
    # Any value of a pattern may meet any other one.
    least = min(ranks)
    scaling = max(map(abs, alphas)) / (math.sqrt(least) if rslora else least)
    if scaling > MAX_SCALING:
        raise AdapterError(
            f"{CONFIG}: lora_alpha {max(map(abs, alphas)):g} with rank {least} scales the matrices by "
            f"{scaling:g}, and {MAX_SCALING:g} is the most"
        )
    return Adapter(path, max(ranks), scaling)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _copy(source: Path, target: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        if not (source / name).is_file():
            raise AdapterError(f"has no file {name}; an adapter in PEFT's format has {CONFIG} and {WEIGHTS}")
        _check_size(name, (source / name).stat().st_size)
        shutil.copyfile(source / name, target / name)


def _download(url: str, target: Path) -> None:
    try:
        from fsspec.callbacks import Callback
        from fsspec.core import url_to_fs

        of_web = url.startswith(("http://", "https://"))
        fs, root = url_to_fs(url, **({"get_client": _web_client} if of_web else {}))
    except ImportError as error:
        message = "needs fsspec and the package of its scheme: pip install 'saturate[storage]' s3fs"
        raise AdapterError(f"{message} ({error})") from None
    for name in (CONFIG, WEIGHTS):
        path = f"{root.rstrip('/')}/{name}"
        if not fs.exists(path):
            raise AdapterError(f"has no file {name}; an adapter in PEFT's format has {CONFIG} and {WEIGHTS}")
        _check_size(name, int(fs.size(path) or 0))
        # A web server need not tell the size, or the right one.
        bounded = Callback(hooks={"size": lambda _, value, name=name, **__: _check_size(name, value)})
        fs.get_file(path, str(target / name), callback=bounded)


async def _web_client(**options: Any) -> Any:
    """Return a client for fsspec that follows redirections to other addresses with https only."""
    import aiohttp

    async def check(_session: Any, _context: Any, answer: Any) -> None:
        headers = answer.response.headers
        address = urljoin(str(answer.url), headers.get("Location") or headers.get("URI") or "")
        if not address.startswith("https://"):
            raise AdapterError(f"is redirected to {address}, and only https:// is followed")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(check)
    return aiohttp.ClientSession(trace_configs=[trace], **options)


def _from_hub(repository: str, target: Path) -> None:
    from huggingface_hub import hf_hub_download

    # Both files are of one commit.
    commit: str | None = None
    for name in (CONFIG, WEIGHTS):
        try:
            found = hf_hub_download(repository, name, revision=commit, dry_run=True)
            _check_size(name, found.file_size or 0)
            path = hf_hub_download(repository, name, revision=commit)
            commit = found.commit_hash
        except AdapterError:
            raise
        except Exception as error:  # The client's versions raise errors of different HTTP libraries.
            failure = explain(error, repository, name, kind="adapter", revision=commit)
            raise AdapterError(f"can't be read: {failure.message}") from None
        shutil.copyfile(path, target / name)


def _check_size(name: str, size: int) -> None:
    most = MAX_CONFIG_BYTES if name == CONFIG else MAX_BYTES
    if size > most:
        raise AdapterError(f"{name} has {size} bytes, and {most} are the most")


def check(adapter: Adapter, max_rank: int, shapes: Shapes | None, largest: float = FLOAT32) -> None:
    """Check that an adapter fits the engine. vLLM takes matrices that are too small for its layers.

    Args:
        adapter: The adapter.
        max_rank: The engine's `max_lora_rank`.
        shapes: The base model's layers; None: they aren't known, and are left to vLLM.
        largest: The largest number of the engine's arithmetic.

    Raises:
        AdapterError: It doesn't fit, or its numbers aren't finite.
    """
    if adapter.rank > max_rank:
        raise AdapterError(f"has rank {adapter.rank}, and the engine takes {max_rank} (engine.max_lora_rank)")
    found = _matrices(adapter.path / WEIGHTS)
    if not found:
        raise AdapterError(f"{WEIGHTS} has no matrices")
    if shapes is not None:
        _check_shapes(adapter, found, shapes)
    _check_numbers(adapter, found, largest)


def _check_shapes(adapter: Adapter, found: Mapping[str, tuple[int, ...]], shapes: Shapes) -> None:
    kinds = set(map(_kind, shapes))
    for name, shape in found.items():
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        layer = layer.removeprefix(PREFIX)
        if part == "base_layer" and shapes.get(layer, shape) != shape:
            # PEFT saves the embeddings of the base model too, and vLLM has its own.
            raise AdapterError(f"is for another base model: {name} has shape {shape}, not {shapes[layer]}")
        if part not in ("lora_A", "lora_B"):
            # vLLM knows these, or refuses them.
            continue
        if layer not in shapes:
            if _kind(layer) in kinds:
                raise AdapterError(f"is for another base model: this one has no layer {layer}")
            # vLLM may have another name for it.
            continue
        if len(shape) != 2:
            raise AdapterError(f"{name} is no matrix: it has {len(shape)} dimensions")
        outputs, inputs = shapes[layer]
        size, own = (shape[-1], inputs) if part == "lora_A" else (shape[0], outputs)
        if size != own:
            raise AdapterError(f"is for another base model: {name} has size {size}, and this one {own}")
        rank = shape[0] if part == "lora_A" else shape[-1]
        if rank > adapter.rank:
            raise AdapterError(f"{name} has rank {rank}, and {CONFIG} says {adapter.rank}")


def _check_numbers(adapter: Adapter, found: Mapping[str, tuple[int, ...]], largest: float) -> None:
    """Check that matrices come in pairs, and that all numbers stay finite in the engine."""
    norms = _norms(adapter.path / WEIGHTS)
    for name, norm in norms.items():
        if not norm < math.inf:
            raise AdapterError(f"{name} has values that are not finite (NaN, infinity), or too large")
        if (named := PAIR.fullmatch(name)) is None:
            continue
        layer, kind, half, end = named.groups()
        other = f"{layer}.{kind}_{'B' if half == 'A' else 'A'}{end}"
        if other not in norms:
            raise AdapterError(f"{name} is alone: {WEIGHTS} has no {other}")
        if half == "A":
            continue
        if len(found[name]) == len(found[other]) == 2 and found[other][0] != found[name][1]:
            raise AdapterError(f"{other} has rank {found[other][0]}, and {name} has {found[name][1]}")
        # vLLM multiplies the second matrix by the factor.
        number = max(norms[other], norm, norm * adapter.scaling)
        change = norms[other] * norm * adapter.scaling
        if number > largest or change > MAX_CHANGE:
            raise AdapterError(
                f"changes {layer.removeprefix(PREFIX)} too much: its matrices have the norms "
                f"{norms[other]:g} and {norm:g}, and lora_alpha makes a factor of {adapter.scaling:g}; the "
                f"product may be {MAX_CHANGE:g}, and each number {largest:g} (engine.dtype)"
            )


def _norms(path: Path) -> dict[str, float]:
    """Return the norms of the tensors in a file, by name; NaN or infinite where a value is."""
    import torch
    from safetensors import SafetensorError, safe_open

    norms = {}
    try:
        # NumPy has no bfloat16.
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                parts = file.get_tensor(name).flatten().split(1 << 22)
                squares = (float(part.to(torch.float64).square().sum()) for part in parts)
                norms[name] = math.sqrt(sum(squares))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise AdapterError(f"{WEIGHTS} can't be read: {error}") from None
    return norms


def _kind(layer: str) -> str:
    """Return the name of a layer without its number."""
    return re.sub(r"\b\d+\b", "*", layer)


def _matrices(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a file, by name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{WEIGHTS} can't be read: {error}") from None


def layer_shapes(config: Any) -> Shapes | None:
    """Return the shapes of a base model's linear layers; None: transformers doesn't know the model.

    Args:
        config: The configuration of transformers.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        # Without memory for the weights.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shapes = {
            name: (int(module.weight.shape[0]), int(module.weight.shape[1]))
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        }
    except Exception:
        # transformers raises anything for a model that it doesn't know; vLLM may know it.
        return None
    return shapes or None
