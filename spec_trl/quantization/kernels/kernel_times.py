"""Times the kernels of a layer on its device, and caches the table: the choice of "auto" on a GPU.

A table is measured when a copy is packed first, before its first draft. Until then `default_kernel` stands in.
"""

import copy
import dataclasses
import math
import statistics
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...cuda_graphs import CAPTURING, capture, capture_stream
from ...hardware import hardware_name
from ...json_files import read_json, write_json
from ...user_cache import cache_directory, file_name, read_cached, save_cached
from .base import LayerSpec, PackedWeight, QuantizedRows, join_rows
from .reference import ReferenceInt4, ReferenceNF4


ROWS = (1, 8, 32)  # timed rows of x; tables of earlier releases have more
SMALL_ROWS = 8  # most rows that count in the choice: drafting has few
MOST_ROWS = 64  # most rows of a kernel: twice the last timed number, the furthest extrapolation of the last two times
REPLAYS = 20  # timed calls; the median counts
MIN_CALLS, MAX_CALLS = 8, 128  # calls in a replay
FILL = 1 << 24  # weights made at once
TOLERANCE = 0.05  # of an output's standard deviation: twice the bfloat16 rounding of the largest outputs

Times = dict[int, float]  # rows of x → seconds
Timer = Callable[[str, int, Sequence[Callable[[], Tensor]]], float]
"""(kernel's name or "dense", rows of x, calls) → median seconds of one call, when all are run one after the other. The
calls take turns with copies of the weight that are together too large for the L2 cache."""


@dataclass(frozen=True)
class TableKey:
    """Key of a table: the hardware's name; versions of torch and of the timed kernels' packages; shape, bits, group
    and dtypes of the layer; names of the timed kernels."""

    device: str
    software: str
    layer: str
    kernels: str

    @property
    def path(self) -> Path:
        """Path of the table's file, with a readable name that is unique to the key."""
        text = "_".join(dataclasses.astuple(self))
        return cache_directory() / file_name(f"{self.device}_{self.layer}", text)


@dataclass(frozen=True)
class KernelChoice:
    """A kernel's name, and the most rows of x with a gain over the dense layer."""

    kernel: str
    max_rows: int


@dataclass(frozen=True)
class KernelTable:
    """Seconds of one call, by rows of x; all kernels are timed at the same rows.

    Attributes:
        key: of the table.
        dense: times of the policy's layer.
        kernels: times by name.
        version: to raise when a kernel of ours changes; older tables are then measured again.
    """

    key: TableKey
    dense: Times
    kernels: dict[str, Times]
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        for times in (self.dense, *self.kernels.values()):
            is_whole = times.keys() == self.dense.keys() >= set(ROWS)
            if not is_whole or not all(0 < seconds < math.inf for seconds in times.values()):
                raise ValueError(f"{times} are not positive times for {list(ROWS)} rows")

    def max_rows(self, kernel: str) -> int:
        """The largest number of rows, at most `MOST_ROWS`, at which `kernel` beats the dense layer; straight lines
        join the measured times, and the last one goes on."""
        measured = sorted(self.dense)
        gains = [self.dense[rows] - self.kernels[kernel][rows] for rows in measured]
        if measured[-1] < MOST_ROWS:
            slope = (gains[-1] - gains[-2]) / (measured[-1] - measured[-2])
            gains.append(gains[-1] + slope * (MOST_ROWS - measured[-1]))
            measured.append(MOST_ROWS)
        wins = np.interp(np.arange(1, MOST_ROWS + 1), measured, gains) > 0  # [MOST_ROWS]
        return MOST_ROWS if wins.all() else int(wins.argmin())

    def choose(self) -> KernelChoice | None:
        """The kernel that is fastest up to SMALL_ROWS, in geometric mean; None where the dense layer wins at one row.
        Beyond its `max_rows` a kernel counts with the time of the dense layer, then in use."""

        def small(kernel: str) -> float:
            limit = self.max_rows(kernel)
            few = [rows for rows in self.dense if rows <= SMALL_ROWS]
            return math.fsum(math.log((self.kernels[kernel] if rows <= limit else self.dense)[rows]) for rows in few)

        useful = [kernel for kernel in self.kernels if self.max_rows(kernel)]
        if not useful:
            return None
        best = min(useful, key=lambda kernel: (small(kernel), -self.max_rows(kernel)))
        return KernelChoice(best, self.max_rows(best))

    def save(self) -> None:
        """Writes the table to its file; raises OSError if that fails."""
        write_json(self.key.path, self)

    @classmethod
    def load(cls, key: TableKey) -> "KernelTable":
        """Reads the table for `key`; raises FileNotFoundError if there is none, and ValueError if its file is damaged,
        of another version, or for another key."""
        table = read_json(key.path, cls, "table of kernels", "it is measured again")
        if table.key != key:
            raise ValueError(f"{key.path} is for something else; it is measured again.")
        return table


tables: dict[TableKey, KernelTable] = {}
"""Tables that this process has measured or read."""
failed_kernels: set[str] = set()
"""Names of kernels that failed in this process and are not tried again."""


def time_replays(name: str, rows: int, calls: Sequence[Callable[[], Tensor]]) -> float:
    """Times for a GPU: all calls captured in one CUDA graph, as a drafter replays them."""
    device = calls[0]().device  # compiles what is compiled at first use
    with CAPTURING, torch.cuda.device(device):  # captures of other calls take the same stream
        stream = capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # so that libraries allocate workspaces here, not in a pool
            calls[0]()
        torch.cuda.synchronize()
        graph, _ = capture(lambda: [call() for call in calls][-1], device)
        graph.replay()
        seconds = []
        for _ in range(REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()  # the device is busy until the timed one is launched
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1000 / len(calls))
    return statistics.median(seconds)


def default_kernel(kernels: Sequence[type[PackedWeight]]) -> KernelChoice:
    """The choice without times: Triton's (no package to install, seconds to compile, a weight is read once for up to
    32 rows), else the first kernel; the dense layer for more than `MOST_ROWS` rows."""
    names = [kernel.name for kernel in kernels]
    return KernelChoice("triton" if "triton" in names else names[0], MOST_ROWS)


def choose_measured(layer: LayerSpec, kernels: Sequence[type[PackedWeight]]) -> KernelChoice | None:
    """Returns the fastest of `kernels` for `layer`; None if the dense layer is faster than all."""
    try:
        return kernel_table(layer, kernels).choose()
    except torch.OutOfMemoryError as error:
        choice = default_kernel(kernels)
        warnings.warn(
            f"too little memory is free to measure the kernels for a layer of {layer.shape}, which takes "
            f"{choice.kernel!r} unmeasured: {error}",
            stacklevel=2,
        )
        return choice


def announce(shapes: Collection[str], device: torch.device) -> None:
    """Says that kernels are measured now for layers of these shapes."""
    warnings.warn(
        f"the kernels of the quantized copy are measured on {device} now, before its first draft: {len(shapes)} "
        f"shapes of layers ({', '.join(sorted(shapes))}) with {', '.join(map(str, ROWS))} rows. This takes seconds "
        "per shape, and minutes where a kernel such as Marlin's or Humming's has to be compiled. The times are kept "
        f'in {cache_directory()}; draft_kernel="triton" measures nothing.',
        stacklevel=2,
    )


def known_table(layer: LayerSpec, kernels: Sequence[type[PackedWeight]]) -> KernelTable | None:
    """The :func:`kernel_table` if measured before."""
    key = _key(layer, kernels)
    if key not in tables:
        table = read_cached(key.path, lambda _: KernelTable.load(key), ", and the kernels are measured again")
        if table is None:
            return None
        tables[key] = table
    return tables[key]


def kernel_table(layer: LayerSpec, kernels: Sequence[type[PackedWeight]], timer: Timer = time_replays) -> KernelTable:
    """Times of the dense layer and of the fitting `kernels` for random weights: measured once,
    and saved in memory and in the user's cache. A layer's siblings are timed as they run: in one product if the kernel
    can join their rows, else one after the other.

    A kernel that fails, or whose product differs from that of the codes by more than bfloat16 rounding, is left out.
    One warning names it, and such a table is not saved.
    """
    table = known_table(layer, kernels)
    if table is None:
        table = tables[_key(layer, kernels)] = measure(layer, kernels, timer)
        if len(table.kernels) == len(kernels):
            save_cached(lambda _: table.save(), table.key.path, "times of the kernels")
        if layer.device.type == "cuda":
            torch.cuda.empty_cache()  # weights, and memory of the captures
    return table


def measure(layer: LayerSpec, kernels: Sequence[type[PackedWeight]], timer: Timer) -> KernelTable:
    """Measures a :func:`kernel_table` without saving it."""
    key, dense_dtype = _key(layer, kernels), _dense_dtype(layer)  # under the caller's autocast
    times: dict[str, Times] = {}
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(layer.device.type, enabled=False):
        generator = torch.Generator(layer.device).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=layer.device)
        inputs = {rows: draw(rows, layer.in_features) for rows in ROWS}  # [m, in] each

        def clock(name: str, dtype: torch.dtype, products: Sequence[Callable[[Tensor], Tensor]]) -> Times:
            turns = list(products) * -(-MIN_CALLS // len(products))
            rounded = {rows: x.to(dtype) for rows, x in inputs.items()}  # [m, in] each
            return {rows: timer(name, rows, [partial(product, x) for product in turns]) for rows, x in rounded.items()}

        rows = [part.out_features for part in layer.parts]
        weight = draw(sum(rows), layer.in_features, dtype=dense_dtype)  # [out of all, in]
        weights = [weight, *(weight.clone() for _ in range(_copies(weight.nbytes, layer.device) - 1))]
        apart = [[partial(F.linear, weight=part) for part in weight.split(rows)] for weight in weights]
        dense = clock("dense", dense_dtype, [partial(_multiply, products) for products in apart])
        del weight, weights, apart
        for kernel in kernels:
            if kernel.name in failed_kernels:
                continue
            try:
                packed = _packed(kernel, layer)
                for each in packed:
                    for first, stored in random_rows(each):
                        each.pack_(first, stored)
                    _check(each, inputs)
                nbytes = sum(each.nbytes for each in packed)
                turns = [packed, *(copy.deepcopy(packed) for _ in range(_copies(nbytes, layer.device) - 1))]
                products = [partial(_multiply, [each.linear for each in turn]) for turn in turns]
                times[kernel.name] = clock(kernel.name, packed[0].activation_dtype, products)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a missing compiler, an old driver, a bug: use other kernels
                failed_kernels.add(kernel.name)
                warnings.warn(
                    f"kernel {kernel.name!r} is left out of the choice, because it failed on a layer of "
                    f"{layer.shape}: {error}",
                    stacklevel=4,
                )
    return KernelTable(key, dense, times)


def _packed(kernel: type[PackedWeight], layer: LayerSpec) -> list[PackedWeight]:
    """Empty weights for `layer` and its siblings: one if their rows can be joined."""
    parts = [kernel(part) for part in layer.parts]
    whole = join_rows(parts) if len(parts) > 1 else None
    return parts if whole is None else [whole]


def _multiply(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    """Runs all `products` of x [m, in]; returns the last, [m, out]."""
    *others, last = products
    for product in others:
        product(x)
    return last(x)


def random_rows(packed: PackedWeight) -> Iterator[tuple[int, QuantizedRows]]:
    """A random quantized weight for `packed`, as first row and rows; equal for equal layers."""
    layer, dtype = packed.layer, packed.activation_dtype
    step = max(1, FILL // layer.in_features // 64) * 64  # a multiple of every kernel's row_block
    for first in range(0, layer.out_features, step):
        generator = torch.Generator(layer.device).manual_seed(first)
        count = min(step, layer.out_features - first)
        draw = partial(torch.randint, generator=generator, device=layer.device)
        codes = draw(0, 16, (count, layer.in_features), dtype=torch.int32)  # [rows, in]
        lowest, end = (0, 1) if layer.normal_float else (5, 11)
        zeros = draw(lowest, end, (count, layer.groups), dtype=torch.int32).to(dtype)  # [rows, groups]
        scales = draw(64, 128, (count, layer.groups), dtype=torch.int32).to(dtype) / 4096  # [rows, groups]
        yield first, QuantizedRows(codes, scales, zeros)


def _check(packed: PackedWeight, inputs: dict[int, Tensor]) -> None:
    layer = packed.layer
    rounded = {rows: x.to(packed.activation_dtype) for rows, x in inputs.items()}  # [m, in] each
    products = {rows: packed.linear(x) for rows, x in rounded.items()}  # [m, out] each
    for first, stored in random_rows(packed):
        kind = ReferenceNF4 if layer.normal_float else ReferenceInt4
        reference = kind(dataclasses.replace(layer, out_features=len(stored.codes), activation_dtype=torch.float32))
        reference.pack_(0, stored)
        weight = reference.dequantize()  # [n, in]
        for rows, x in rounded.items():
            exact = F.linear(x.float(), weight)  # [m, n]
            spread = torch.outer(x.float().norm(dim=1), weight.norm(dim=1)) / layer.in_features**0.5  # [m, n]
            y = products[rows][:, first : first + weight.shape[0]]  # [m, n]
            error = ((y.float() - exact).abs() / spread).amax()
            if not error <= TOLERANCE:  # NaN included
                raise ArithmeticError(f"with {rows} rows its product is off by {float(error):.3g} standard deviations")


def _copies(nbytes: int, device: torch.device) -> int:
    """Copies of a weight that together take twice the device's L2 cache."""
    if device.type != "cuda":
        return 1
    return min(MAX_CALLS, -(-2 * torch.cuda.get_device_properties(device).L2_cache_size // nbytes))


def _dense_dtype(layer: LayerSpec) -> torch.dtype:
    device = layer.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else layer.policy_dtype


def _key(layer: LayerSpec, kernels: Sequence[type[PackedWeight]]) -> TableKey:
    packages = dict.fromkeys(kernel.package.name for kernel in kernels if kernel.package is not None)
    return TableKey(
        device=hardware_name(layer.device),
        software=", ".join([f"torch {torch.__version__}", *(f"{name} {_version(name)}" for name in packages)]),
        layer=f"{layer.shape}, {layer.bits} bits, group {layer.group}, "
        f"{_dense_dtype(layer)}, {layer.activation_dtype}",
        kernels=", ".join(kernel.name for kernel in kernels),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # it came with something else
        return "unknown"
