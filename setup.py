"""Reads settings.ini and passes it to setuptools."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
requirements, dev = (cfg[k].split() for k in ("requirements", "dev_requirements"))
extras = {k.removeprefix("extra_"): v.split() for k, v in cfg.items() if k.startswith("extra_")}

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
    package_data={"qie_nb": ["assets/**/*"]},
    python_requires=">=" + cfg["min_python"],
    install_requires=requirements,
    extras_require={"dev": dev, **extras},
    entry_points={"console_scripts": cfg["console_scripts"].split(), "nbdev": [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"]},
    zip_safe=False,
)
