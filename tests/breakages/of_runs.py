"""Small mistakes in planning, training, evaluation, sampling and extras; `make mutations` tries them."""
from code_changes import Change, Mutation

MUTATIONS: dict[str, Mutation] = {
}
