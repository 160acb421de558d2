"""Imitates a CPU whose float32 products depend on memory addresses: with this folder on PYTHONPATH, each result of
`linear`, of a convolution and of attention moves by at most one unit in the last place, as a function of its operands'
addresses. `make test-perturbed` runs notebooks and tests this way; what still passes does not depend on equal bits."""
import ctypes, functools, importlib.abc, importlib.util, sys

PATCHED = ("linear", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention")
results = 0 # that were moved in this process


def perturb(out, operands):
    "Moves a contiguous float32 CPU tensor in place by -1, 0 or 1 units in the last place. Runs no torch operation."
    import numpy as np, torch
    global results
    if type(out) is not torch.Tensor or out.device.type != "cpu" or out.dtype != torch.float32: return out
    if not out.is_contiguous() or not out.numel(): return out
    try: addresses = [t.data_ptr() for t in operands if type(t) in (torch.Tensor, torch.nn.Parameter)]
    except RuntimeError: return out # a tensor without memory, e.g. while shapes are traced
    bits = np.frombuffer((ctypes.c_int32 * out.numel()).from_address(out.data_ptr()), np.int32)
    pattern = _pattern()
    start = hash(tuple(a >> 4 for a in addresses)) % (len(pattern) // 2)
    steps = np.resize(pattern[start:start + min(len(bits), len(pattern) // 2)], len(bits))
    exponent = bits & 0x7F800000
    bits += np.where((exponent != 0) & (exponent != 0x7F800000), steps, 0).astype(np.int32)
    results += 1
    return out


@functools.lru_cache
def _pattern():
    import numpy as np
    return np.random.default_rng(0).integers(-1, 2, 1 << 15, dtype=np.int32)


def moved(real):
    "`real` with moved results. Tensor subclasses and function modes are given `call` itself: they compare it with functions of `F`."
    @functools.wraps(real)
    def call(*args, **kwargs):
        import torch
        from torch.overrides import handle_torch_function, has_torch_function
        if torch.compiler.is_compiling(): return real(*args, **kwargs) # a graph must not depend on `results`
        before, given = results, (*args, *kwargs.values())
        out = handle_torch_function(call, given, *args, **kwargs) if has_torch_function(given) else real(*args, **kwargs)
        return out if results > before else perturb(out, given) # moved once
    return call


def install():
    import torch.nn.functional as F
    for name in PATCHED: setattr(F, name, moved(getattr(F, name)))


class AfterTorch(importlib.abc.MetaPathFinder):
    "Patches torch once it is imported."
    def find_spec(self, name, path=None, target=None):
        if name != "torch": return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        load = spec.loader.exec_module
        def exec_module(module): load(module); install()
        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterTorch())
