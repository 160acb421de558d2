"""Reads settings.ini and passes it to setuptools."""
import ast
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
UNBOUNDED = "torch" # pip must not replace a torch that was built for the machine's GPU; the doctor warns of an old one


def tested_versions() -> dict:
    "The oldest and newest version of each tested package. The doctor's file is parsed: its imports are not installed yet."
    tree = ast.parse((here / "qie_nb" / "planning" / "doctor.py").read_text(encoding="utf-8"))
    found = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "TRIED"]
    return ast.literal_eval(found[0].value)


def with_lower_bound(name: str, tested: dict) -> str:
    "A requirement: the package, and its oldest tested version."
    if name == UNBOUNDED or name not in tested: return name
    return f"{name}>={tested[name][0]}"


parser = ConfigParser(delimiters=["="])
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
tested = tested_versions()
requirements = [with_lower_bound(name, tested) for name in cfg["requirements"].split()]
extras = {k.removeprefix("extra_"): v.split() for k, v in cfg.items() if k.startswith("extra_")}
optional = [requirement for extra in extras.values() for requirement in extra]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    url=cfg["git_url"],
    author=cfg["author"],
    author_email=cfg["author_email"],
    license="Apache-2.0",
    keywords=cfg["keywords"].split(),
    packages=find_packages(include=["qie_nb", "qie_nb.*"]),
    include_package_data=True,
    package_data={"qie_nb": ["py.typed", "assets/**/*", "extras/*.json"]},
    python_requires=">=" + cfg["min_python"],
    install_requires=requirements,
    extras_require={"dev": [*cfg["dev_requirements"].split(), *optional], **extras},
    entry_points={"console_scripts": cfg["console_scripts"].split()},
    zip_safe=False,
)
