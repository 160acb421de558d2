__version__ = "0.1.0"

from .core.startup import NAMES, Lazy, prepare

__all__ = sorted(NAMES)
globals().update({name: Lazy(name, module) for name, module in NAMES.items()})
prepare()
