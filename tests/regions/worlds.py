"""Programs whose state changes, run plainly and with regions, and everything compared that they leave behind.

A program is a function of `run`, which calls what is to be a region: `run(function, *args)`. It returns its world, the
objects that somebody could look at afterwards. It is run once for each way of calling, each time from the seed on, so
that every run has objects of its own that begin equal, closures and globals included.

    compared          of
    loss, gradients   all tensors that are reached from the world
    state             attributes, slots, containers in their order, cells, defaults, class attributes, parameters,
                      buffers, hooks, flags, generators, iterators; which objects are the same, and share a storage
    switches          the generators, dtypes, modes, precisions and hooks of the whole process

`differences` names the path of all that differs. Version counters and numbers of handles are no state.
"""

import collections
import functools
import gc
import inspect
import random
import threading
import traceback
import types
import weakref
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

import torchremat
from probes.regions import RegionRecompute
from regions.comparing import live_regions
from torchremat.errors import TorchrematError
from torchremat.policies import save_matmuls, save_operators

# ------------------------------------------------------------------------------------------------------ ways to call


def _nested(function, *args, **kwargs):
    def inner(*args, **kwargs):
        return torchremat.checkpoint(function, *args, **kwargs)

    return torchremat.checkpoint(inner, *args, **kwargs)


def _wrapped(function, *args, **kwargs):
    if not isinstance(function, nn.Module):
        return torchremat.checkpoint(function, *args, **kwargs)
    if not isinstance(function.__dict__.get("forward"), torchremat.regions.forwards.WrappedForward):
        torchremat.wrap(function, "")
        wrapped_modules.append(weakref.ref(function))
    return function(*args, **kwargs)


def _with(**options):
    def call(function, *args, **kwargs):
        return torchremat.checkpointed(function, **options)(*args, **kwargs)

    return call


def _method(function, *args, **kwargs):
    """A module's `forward`, as torch's documentation of checkpoint shows it."""
    return torchremat.checkpoint(function.forward if isinstance(function, nn.Module) else function, *args, **kwargs)


def _plain(function, *args, **kwargs):
    return function(*args, **kwargs)


WAYS = {
    "plain": _plain,
    "checkpoint": torchremat.checkpoint,
    "to the end": _with(early_stop=False),
    "matmuls kept": _with(policy=save_matmuls),
    "products kept": _with(policy=save_operators("aten.mul", "aten.sin", "aten.add")),
    "values": _with(check="values"),
    "nested": _nested,
    "wrap": _wrapped,
    "method": _method,
}
REGIONS = tuple(name for name in WAYS if name != "plain")


class _Runs:
    """What is a way of calling; asked by identity, as tensors have an equality of their own."""

    def __contains__(self, item):
        return any(item is way for way in WAYS.values())


_RUNS = _Runs()
wrapped_modules = []


def unwrap_all():
    """Take off what `wrap` has put on, so that modules are compared as they are."""
    while wrapped_modules:
        module = wrapped_modules.pop()()
        if module is not None:
            torchremat.unwrap(module)


# -------------------------------------------------------------------------------------------------------- comparison

_PLAIN_TYPES = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    type(...),
    range,
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
_FUNCTIONS = types.FunctionType
_BY_IDENTITY = (
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    type(torch.sin),
    types.MethodDescriptorType,
)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Thread, threading.Event)
_SKIPPED = {"__weakref__", "__dict__", "__module__", "__doc__", "__annotations__", "__annotate_func__"}
_SKIPPED |= {"__annotations_cache__", "__static_attributes__", "__firstlineno__", "__parameters__"}


class Differences:
    """Walks two worlds side by side, and lists where they differ.

    Globals are not walked, as a script hands over its own: see `script`.
    """

    def __init__(self):
        self.found = []
        self._met = {}
        self._back = {}
        self._storages = {}
        self._alive = []  # so that no id is used twice

    def compare(self, ours, plain, path="world"):
        if len(self.found) >= 20:
            return
        if ours in _RUNS and plain in _RUNS:
            return  # the ways of calling, which differ between the runs
        if isinstance(ours, weakref.ReferenceType) and isinstance(plain, weakref.ReferenceType):
            ours, plain, path = ours(), plain(), f"{path}()"
        if type(ours) is not type(plain) and not self._is_same_class(type(ours), type(plain), path):
            self.found.append(f"{path}: {_shown(ours)} instead of {_shown(plain)}")
            return
        if isinstance(ours, _PLAIN_TYPES):
            if not (ours == plain or (ours != ours and plain != plain)):
                self.found.append(f"{path}: {ours!r} instead of {plain!r}")
            return
        if isinstance(ours, _BY_IDENTITY):
            if ours is not plain and ours != plain:
                self.found.append(f"{path}: {_shown(ours)} instead of {_shown(plain)}")
            return
        if self._seen(ours, plain, path):
            return
        if isinstance(ours, Tensor):
            self._tensors(ours, plain, path)
        elif isinstance(ours, torch.Generator):
            if not torch.equal(ours.get_state(), plain.get_state()):
                self.found.append(f"{path}: a generator in another state")
        elif isinstance(ours, type):
            if not self._is_same_class(ours, plain, path):
                self.found.append(f"{path}: {_shown(ours)} instead of {_shown(plain)}")
        elif isinstance(ours, _LOCKS) or type(ours).__name__ == "RemovableHandle":
            return
        else:
            self._objects(ours, plain, path)

    def _seen(self, ours, plain, path):
        """Whether this pair was met; one object that is two in the other world is a difference."""
        met, back = self._met.get(id(ours)), self._back.get(id(plain))
        if met is None and back is None:
            self._met[id(ours)], self._back[id(plain)] = plain, ours
            self._alive += [ours, plain]
            return False
        # Tuples and functions without state may be constants in one place and be made in another.
        if (met is not plain or back is not ours) and not isinstance(ours, tuple | frozenset | types.MethodType):
            self.found.append(f"{path}: other objects are the same ones")
        return met is plain

    def _is_same_class(self, ours, plain, path):
        if ours is plain:
            return True
        if ours.__qualname__ != plain.__qualname__ or ours.__module__ != plain.__module__:
            return False
        # Made anew in each run. Class attributes are state as well.
        if not self._seen(ours, plain, path):
            self.compare(_class_state(ours), _class_state(plain), f"{path}.__class__")
        return True

    def _tensors(self, ours, plain, path):
        if nn.parameter.is_lazy(ours):
            self.compare(ours.requires_grad, plain.requires_grad, f"{path}.requires_grad")
            return
        for name in ("dtype", "shape", "requires_grad", "is_leaf", "layout"):
            with torch._C.DisableTorchFunctionSubclass():
                a, b = getattr(ours, name), getattr(plain, name)
            if a != b:
                self.found.append(f"{path}.{name}: {a} instead of {b}")
                return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if ours.stride() != plain.stride():
                self.found.append(f"{path}: strides {ours.stride()} instead of {plain.stride()}")
            elif not _same_bits(ours, plain):
                self.found.append(f"{path}: other values, {_distance(ours, plain)}")
            one, other = ours.untyped_storage().data_ptr(), plain.untyped_storage().data_ptr()
            if ours.numel() and self._storages.setdefault(one, other) != other:
                self.found.append(f"{path}: shares a storage with something else")
            grad, expected = (ours.grad, plain.grad) if ours.is_leaf else (None, None)
        self.compare(grad, expected, f"{path}.grad")
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            a, b = getattr(ours, name, None), getattr(plain, name, None)
            self.compare(list((a or {}).values()), list((b or {}).values()), f"{path}.{name}")
        self.compare(dict(ours.__dict__), dict(plain.__dict__), f"{path}.__dict__")

    def _objects(self, ours, plain, path):
        if isinstance(ours, dict):
            self._dicts(ours, plain, path)
        elif isinstance(ours, list | tuple | deque):
            if isinstance(ours, deque):
                self.compare(ours.maxlen, plain.maxlen, f"{path}.maxlen")
            self._sequences(list(ours), list(plain), path)
        elif isinstance(ours, set | frozenset):
            a, b = sorted(map(_shown, ours)), sorted(map(_shown, plain))
            if a != b:
                self.found.append(f"{path}: {a} instead of {b}")
        elif isinstance(ours, _FUNCTIONS):
            self._functions(ours, plain, path)
        elif isinstance(ours, types.MethodType):
            self.compare(ours.__self__, plain.__self__, f"{path}.__self__")
            self.compare(ours.__func__, plain.__func__, f"{path}.__func__")
        elif isinstance(ours, types.CellType):
            self.compare(_content(ours), _content(plain), f"{path}.cell_contents")
        elif isinstance(ours, functools.partial):
            for name in ("func", "args", "keywords"):
                self.compare(getattr(ours, name), getattr(plain, name), f"{path}.{name}")
        elif hasattr(ours, "__length_hint__"):
            self.compare(ours.__length_hint__(), plain.__length_hint__(), f"{path}, what is left of it")
        elif type(ours).__module__ == "itertools":
            self.compare(repr(ours), repr(plain), path)
        if not isinstance(ours, _FUNCTIONS):
            self._attributes(ours, plain, path)

    def _attributes(self, ours, plain, path):
        if isinstance(getattr(ours, "__dict__", None), dict):
            a, b = _own(ours), _own(plain)
            if isinstance(ours, nn.Module):
                for name in [one for one in a if "hooks" in one and isinstance(a[one], dict)]:
                    # Their keys are numbers of handles, which only rise.
                    self.compare(list(a.pop(name).values()), list(b.pop(name, {}).values()), f"{path}.{name}")
            self._dicts(a, b, path, attributes=True)
        for kind in type(ours).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in _SKIPPED and not name.startswith("__"):
                    a, b = getattr(ours, name, "is not set"), getattr(plain, name, "is not set")
                    self.compare(a, b, f"{path}.{name}")

    def _dicts(self, ours, plain, path, *, attributes=False):
        # What is no plain value is named by its place, as it is another object in each run.
        a = {_key(key, place): value for place, (key, value) in enumerate(ours.items())}
        b = {_key(key, place): value for place, (key, value) in enumerate(plain.items())}
        if list(a) != list(b) and (not attributes or a.keys() != b.keys()):
            self.found.append(f"{path}: keys {list(a)} instead of {list(b)}")
        for key in a.keys() & b.keys():
            self.compare(a[key], b[key], f"{path}.{key}" if attributes else f"{path}[{key!r}]")

    def _sequences(self, ours, plain, path):
        if len(ours) != len(plain):
            self.found.append(f"{path}: {len(ours)} items instead of {len(plain)}: {_shown(ours)}, {_shown(plain)}")
        for place, (a, b) in enumerate(zip(ours, plain, strict=False)):
            self.compare(a, b, f"{path}[{place}]")

    def _functions(self, ours, plain, path):
        if ours.__code__ is not plain.__code__ and ours.__code__ != plain.__code__:
            self.found.append(f"{path}: {_shown(ours)} instead of {_shown(plain)}")
            return
        self.compare(ours.__defaults__, plain.__defaults__, f"{path}.__defaults__")
        self.compare(ours.__kwdefaults__, plain.__kwdefaults__, f"{path}.__kwdefaults__")
        self.compare(ours.__dict__, plain.__dict__, f"{path}.__dict__")
        for name, a, b in zip(ours.__code__.co_freevars, ours.__closure__ or (), plain.__closure__ or (), strict=True):
            self.compare(_content(a), _content(b), f"{path}<{name}>")


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:
        return "an empty cell"


def _own(item):
    return {key: value for key, value in item.__dict__.items() if key not in _SKIPPED}


def _class_state(kind):
    return {
        key: value
        for key, value in kind.__dict__.items()
        if key not in _SKIPPED
        and not inspect.isgetsetdescriptor(value)
        and not inspect.ismemberdescriptor(value)
        and not (key.startswith("__") and not callable(value))
    }


def _key(key, place):
    if isinstance(key, tuple):
        return tuple(_key(one, place) for one in key)
    return key if isinstance(key, _PLAIN_TYPES) else f"<{type(key).__name__} {place}>"


def _shown(item):
    if isinstance(item, Tensor):
        return f"{type(item).__name__}{list(item.shape)}"
    if isinstance(item, nn.Module):
        return f"a module {type(item).__name__}"
    if isinstance(item, _FUNCTIONS | types.MethodType):
        return item.__qualname__
    if isinstance(item, _PLAIN_TYPES):
        return repr(item)
    if isinstance(item, list | tuple):
        return f"[{', '.join(map(_shown, item))}]"[:200]
    return f"an object of {type(item).__qualname__}"


def _same_bits(ours, plain):
    if ours.dtype.is_complex:
        ours, plain = torch.view_as_real(ours.resolve_conj()), torch.view_as_real(plain.resolve_conj())
    return bool(((ours == plain) | ((ours != ours) & (plain != plain))).all())


def _distance(ours, plain):
    if not ours.dtype.is_floating_point:
        return "not of floating point"
    return f"by {float((ours - plain).norm() / plain.norm().clamp(min=1e-9)):.1%}"


def differences(ours, plain):
    """Return where two worlds differ, as lines; empty if they do not."""
    walk = Differences()
    walk.compare(ours, plain)
    return walk.found


# ----------------------------------------------------------------------------------------------------------- running


def switches():
    """What is set for the whole process or thread, as values to compare and to put back."""
    return {
        "generator": torch.random.get_rng_state(),
        "random": random.getstate()[1][:3],
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "checks arguments": torch.distributions.Distribution._validate_args,
        "threads": torch.get_num_threads(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": len(dispatch_modes()),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "module hooks": [
            len(getattr(torch_module, name))
            for name in sorted(vars(torch_module))
            if name.startswith("_global_") and isinstance(getattr(torch_module, name), dict)
        ],
    }


def _put_back(before):
    """Put the switches of the process back, so that a program that fails spoils no other."""
    torch.set_default_dtype(before["default dtype"])
    torch.set_grad_enabled(before["grad mode"])
    torch.use_deterministic_algorithms(before["deterministic"], warn_only=before["warns only"])
    torch.set_float32_matmul_precision(before["precision"])
    torch.set_anomaly_enabled(*before["anomaly"])
    torch.set_autocast_enabled("cpu", before["autocast"])
    torch.set_autocast_dtype("cpu", before["autocast dtype"])
    torch.set_autocast_cache_enabled(before["autocast cache"])
    torch.backends.cuda.enable_flash_sdp(before["flash"])
    torch.backends.cuda.enable_math_sdp(before["math"])
    torch.backends.cudnn.benchmark = before["benchmark"]
    torch.utils.deterministic.fill_uninitialized_memory = before["fill"]
    torch.distributions.Distribution.set_default_validate_args(before["checks arguments"])
    torch.set_num_threads(before["threads"])
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    torch.random.set_rng_state(before["generator"])


@dataclass
class Outcome:
    """What became of a program: its world and the switches, or its error."""

    world: object = None
    switches: dict = field(default_factory=dict)
    error: BaseException | None = None
    recomputes: int = 0

    @property
    def said(self):
        """The error, with the last line of the program that it came from."""
        if self.error is None:
            return ""
        frames = [one for one in traceback.extract_tb(self.error.__traceback__) if "/tests/" in one.filename]
        place = f" (line {frames[-1].lineno} of {frames[-1].filename.rpartition('/')[2]})" if frames else ""
        return f"{type(self.error).__name__}: {str(self.error)[:600]}{place}"


_recomputes = 0


def count_recomputes():
    """Count the recomputes that begin, from now on; return how many there were until now."""
    if not hasattr(RegionRecompute, "_counted_by_tests"):
        init = RegionRecompute.__init__

        @functools.wraps(init)
        def counted(self, *args, **kwargs):
            global _recomputes
            _recomputes += 1
            init(self, *args, **kwargs)

        RegionRecompute.__init__ = counted
        RegionRecompute._counted_by_tests = True
    return _recomputes


def outcome(program, way, seed=0):
    """Run a program in one way from a seed, and return what became of it."""
    before = switches()
    started = count_recomputes()
    result = Outcome()
    torch.manual_seed(seed)
    try:
        result.world = program(WAYS[way] if isinstance(way, str) else way)
    except Exception as error:  # noqa: BLE001  it is part of what became of it
        result.error = error
    unwrap_all()
    result.recomputes = count_recomputes() - started
    result.switches = switches()
    _put_back(before)
    return result


def assert_agrees(program, way, *, raises=(), recomputes=True, seed=0):
    """Run a program plainly and in a way, and fail unless both leave the same behind.

    Args:
        program: A function of `run`.
        way: One of `REGIONS`.
        raises: Errors that are right instead. If the plain run raises, an error has to be raised in any case.
        recomputes: Whether something has to be recomputed, if no policy keeps what is needed; False where the docs say
            that the call is a plain one.
        seed: Where the generator begins.
    """
    plain = outcome(program, "plain", seed)
    others = weakref.WeakSet(live_regions())  # what an earlier failure has left
    ours = outcome(program, way, seed)
    if plain.error is not None:
        assert ours.error is not None, f"the plain run raises, this does not: {plain.said}"
        assert isinstance(ours.error, (type(plain.error), TorchrematError)), ours.said
        return
    if ours.error is not None:
        assert isinstance(ours.error, raises), f"raises where the plain run does not: {ours.said}"
        found = differences(ours.switches, plain.switches)
        assert [line for line in found if "generator" not in line] == []
        return
    found = differences(ours.world, plain.world) + differences(ours.switches, plain.switches)
    assert found == [], "differs from the plain run:\n  " + "\n  ".join(found)
    if recomputes and "kept" not in way:
        assert ours.recomputes > 0, "nothing was recomputed"
    del ours, plain
    # Cycles are the programs' own, as that of a module with a hook on itself.
    gc.collect()
    left = [one for one in live_regions() if one not in others]
    assert left == [], f"{len(left)} regions are alive although everything was dropped"


def assert_agrees_in_all(program, ways, **options):
    """`assert_agrees` in one way after the other."""
    for way in ways:
        try:
            assert_agrees(program, way, **options)
        except BaseException as error:
            error.add_note(f"in the way {way!r}")
            raise


def script(source, run, **names):
    """Run source as a script of its own, whose variables are globals, and return these.

    Args:
        source: The source, in which `run` is the call that makes a region.
        run: That call.
        names: Further globals.
    """
    module = types.ModuleType("a_script")
    module.__dict__.update(torch=torch, nn=nn, run=run, collections=collections, **names)
    exec(compile(inspect.cleandoc(source), "a_script.py", "exec"), module.__dict__)
    keep = {"run", *names}
    return {key: value for key, value in vars(module).items() if key not in keep and not key.startswith("__")}


class Programs:
    """A list of programs, each with what is allowed of it, for the parameters of a test."""

    def __init__(self):
        self.all = {}

    def __call__(self, function=None, *, raises=(), recomputes=True, ways=REGIONS):
        """Add a program; usable as a decorator, with what `assert_agrees` allows and the ways that make sense."""
        if function is None:
            return functools.partial(self, raises=raises, recomputes=recomputes, ways=ways)
        self.all[function.__name__] = (function, ways, {"raises": raises, "recomputes": recomputes})
        return function

    def cases(self):
        """Return the arguments of `assert_agrees_in_all` for each program, with their names."""
        import pytest

        return [pytest.param(*case, id=name) for name, case in self.all.items()]


class Events:
    """What happens in the plain run of a random program; out of reach of its regions, which would put it back.

    A refusal is justified if a tensor was written in place after a region had begun that reads or writes it.
    """

    def __init__(self):
        self.start(plain=True)

    def start(self, *, plain):
        """Forget what was, for the next run."""
        self.plain, self.features = plain, []
        self._time, self._open, self._regions, self._writes, self._backwards = 0, [], [], [], []

    def _now(self):
        self._time += 1
        return self._time

    def begin(self):
        """Note that a region begins; return it."""
        region = (self._now(), {})
        self._regions.append(region)
        self._open.append(region)
        self.features.append(f"nested in {len(self._open) - 1}")
        return region

    def end(self, region):
        """Note that a region ends."""
        self._open.remove(region)

    def read(self, tensor):
        """Note that the regions that are open read a tensor that cannot be given back."""
        for _, tensors in self._open:
            tensors[id(tensor)] = tensor

    def write(self, tensor, *, inside=False):
        """Note that such a tensor is written in place, inside of a backward or not."""
        self.read(tensor)
        if self.plain:
            self._writes.append((self._now(), tensor, inside))

    def backward(self):
        """Note that a backward begins."""
        self._backwards.append(self._now())

    def met(self, name):
        """Note a feature."""
        if self.plain:
            self.features.append(name)

    def justify(self):
        """Return whether a refusal is right."""
        return any(
            begin < time and id(tensor) in tensors and any(time < backward for backward in self._backwards)
            for begin, tensors in self._regions
            for time, tensor, _ in self._writes
        )


events = Events()


def call(way, function, *args):
    """Call a function as a region of some kind; in the plain run of a random program plainly, which is noted."""
    if way == "method" and isinstance(function, nn.Module):
        function = function.forward  # without hooks, in both
    if not events.plain:
        return WAYS[way](function, *args)
    events.met(f"way: {way}")
    region = events.begin()
    try:
        return function(*args)
    finally:
        events.end(region)


def wrap(module, kind):
    """Wrap a module of a random program, which calls it as it calls others."""
    if not events.plain:
        torchremat.wrap(module, "", policy=save_matmuls if kind == "policy" else None)
        wrapped_modules.append(weakref.ref(module))
