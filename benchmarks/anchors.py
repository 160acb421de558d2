"""Times of training steps that others published and we measured, beside those that the planner computes.

Its rates rest on them. `benchmarks/session_table.py` puts the table into docs/measured/speed.md.
Each case has the shapes of the published run, as far as they are known; FLUX.1-dev is written as
a Qwen transformer of the same width and about the same number of layers."""
from dataclasses import dataclass, field

from table import markdown


@dataclass(frozen=True)
class Anchor:
    """A published or measured time of a step."""
    what: str
    gpu: str
    seconds: float # of a step
    source: str
    shapes: dict = field(default_factory=dict) # fields of `MemoryQuery`, beside the newest model's at 1024 x 1024

    def computed(self) -> float:
        """The planner's seconds."""
        from qie_nb.planning.cards import step_seconds
        from qie_nb.planning.memory import MemoryQuery
        query = MemoryQuery(**dict(text=250, zero_cond=True, adapter_bytes=2) | self.shapes)
        return step_seconds(query, self.gpu)


FLUX = dict(zero_cond=False, layers=52, target=1536, control=0, text=512, quantization="nf4", r=4)
SMALL_NF4 = dict(target=1024, control=1024, quantization="nf4", r=8)
TEXT_TO_IMAGE = dict(zero_cond=False, target=6889, control=0)
ANCHORS = (
    Anchor("FLUX.1-dev, nf4, 512 x 768", "T4", 5.1, "Hugging Face blog flux-qlora: 2,800 passes in about 4 h", FLUX),
    Anchor("the same", "RTX 4090", 0.88, "the same blog: 41 min", FLUX),
    Anchor("Qwen edit, nf4, 512 x 512", "RTX 5080", 1.7, "AcademiaSD", SMALL_NF4),
    Anchor("text to image, 1328 x 1328", "RTX 6000 Ada", 6.6, "OneTrainer, without a mask", TEXT_TO_IMAGE),
    Anchor("Edit-Plus, batch 2", "A100 80", 14.7, "musubi-tuner issue 694; later 22.4", dict(batch=2)),
    Anchor("Edit-Plus, random weights", "H100", 1.47, "measured, eager", dict(zero_cond=False)),
    Anchor("the same, nothing recomputed", "H100", 0.85, "measured, compiled",
           dict(zero_cond=False, checkpointing=False, compiled=True)))


def anchor_table() -> str:
    """Markdown."""
    rows = [[a.what, a.gpu, f"{a.seconds:g} s", f"{a.computed():.1f} s", a.source] for a in ANCHORS]
    return markdown(["step", "GPU", "measured", "computed", "source"], rows)
