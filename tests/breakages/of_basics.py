"""Small mistakes in core, configuration, command line, data, encoding, logs, tiny model and widgets; `make mutations` tries them."""
from code_changes import Change, Mutation

MUTATIONS: dict[str, Mutation] = {
}
