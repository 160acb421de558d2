"""Put before the path of processes that `fit` starts: writes down what they load and send, or lets one of them fail (QIE_NB_FAULT)."""
import json, os

if (rank := os.environ.get("RANK")) is not None and (out := os.environ.get("QIE_NB_WATCHED")):
    from qie_nb.devices import edit_model
    from qie_nb.training import step

    def tell(**what):
        with open(f"{out}/{rank}.jsonl", "a") as f: f.write(json.dumps(what) + "\n")

    real_load, real_loss, calls = edit_model.load_component, step.flow_matching_loss, []

    def load_component(folder, name, *a, **kw):
        tell(loads=name, alone="QIE_NB_TURNS" not in os.environ)
        made = real_load(folder, name, *a, **kw)
        tell(loaded=name)
        return made

    def write_nan(model): # into the adapter, as an update with an infinite rate does
        import torch
        trained = [p for p in model.parameters() if p.requires_grad]
        with torch.no_grad():
            trained[0][0, 0] = float("nan")

    def flow_matching_loss(model, *a, **kw):
        calls.append(model)
        if os.environ.get("QIE_NB_FAULT") == f"{rank} {len(calls)}": raise ZeroDivisionError("a fault of the test")
        if os.environ.get("QIE_NB_FAULT") == f"NaN {len(calls)}":
            write_nan(model)
        if len(calls) == 4 and hasattr(model, "_get_ddp_logging_data"): tell(sent=sum(map(int, model._get_ddp_logging_data()["bucket_sizes"].split(","))))
        return real_loss(model, *a, **kw)

    edit_model.load_component, step.flow_matching_loss = load_component, flow_matching_loss

    from qie_nb.training.step import StepBatches
    real_init = StepBatches.__init__

    def init(self, batches, *a, **kw): # the samples that count in this process's part of a step
        real_init(self, batches, *a, **kw)
        tell(step=[i for b, n in zip(self, self.counts) for i in b["sample_id"][:n]])

    StepBatches.__init__ = init
