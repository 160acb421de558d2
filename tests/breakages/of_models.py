"""Small mistakes in models, LoRA files and devices; `make mutations` tries them."""
from code_changes import Change, Mutation

MUTATIONS: dict[str, Mutation] = {
}
