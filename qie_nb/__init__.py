__version__ = "0.1.0"

from .core.startup import PROVIDED, Lazy, prepare

__all__ = ["ImageDataset", "QwenImageEditTrainer", "before_after", "cache_status", "compare_edits",
           "compare_validation", "doctor", "plan", "sample_viewer", "show_tensorboard"]

# the names of a first session: a module is imported when its name is first used
QwenImageEditTrainer = Lazy("QwenImageEditTrainer", "qie_nb.trainer")
ImageDataset = Lazy("ImageDataset", "qie_nb.data.dataset")
plan = Lazy("plan", "qie_nb.planning.cards")
doctor = Lazy("doctor", "qie_nb.planning.doctor")
compare_edits = Lazy("compare_edits", "qie_nb.evaluation.compare")
compare_validation = Lazy("compare_validation", "qie_nb.evaluation.compare")
sample_viewer = Lazy("sample_viewer", "qie_nb.widgets.sample_viewer")
cache_status = Lazy("cache_status", "qie_nb.widgets.cache_status")
before_after = Lazy("before_after", "qie_nb.widgets.before_after")
show_tensorboard = Lazy("show_tensorboard", "qie_nb.widgets.tensorboard")

# what a room needs of rooms to its right
PROVIDED["misfit of a cache"] = Lazy("cache_misfit", "qie_nb.planning.doctor")
PROVIDED["misfit of a checkpoint"] = Lazy("checkpoint_misfit", "qie_nb.training.resume")
PROVIDED["started process"] = Lazy("started_process", "qie_nb.cli")

prepare()
