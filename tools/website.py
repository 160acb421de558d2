"""Builds README, the pages of docs/ and all notebooks as a web site.

`make site` writes it to site/. mkdocs-material renders the pages, mkdocs-jupyter the notebooks
with their committed outputs; nothing is run. Both are in docs/requirements.txt, an environment of
their own. A link that leads nowhere ends the build with a list."""
import argparse, json, os, re, shutil, subprocess, sys, tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/qie-nb/qie_nb"
FIRST = ["story", "data", "kaggle", "colab", "jobs", "recipes", "faq", "glossary"]
THEN = ["results", "evaluation", "predict", "lightning", "resume", "widgets", "speed", "cache"]
# what is copied; links to other files lead to the repository
SHOWN = ("*.md", "*.ipynb", "*.png", "*.jpg")
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
# of an output
HTML_LINK = re.compile(r'<a href="([^"]+)"[^>]*>(.*?)</a>', re.S)


def sources() -> list: # paths relative to the repository
    "The files of the site."
    found = [Path(name) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    for folder in ("docs", "nbs", "kaggle"):
        for pattern in SHOWN:
            found += [p.relative_to(ROOT) for p in sorted((ROOT/folder).rglob(pattern))]
    return [p for p in found if ".ipynb_checkpoints" not in p.parts]


def target_of(link:str, here:Path, shown:set) -> str:
    """A link of the file `here`, as the site has it.

    Links to notebooks lead to pages, and links to files that are not shown to the repository."""
    parts = urlsplit(link)
    if parts.scheme or not parts.path:
        return link
    path = (ROOT/here.parent/unquote(parts.path)).resolve()
    if not path.is_relative_to(ROOT) or not path.exists():
        return link # reported as dead
    name = path.relative_to(ROOT)
    if name not in shown:
        return f"{REPOSITORY}/blob/main/{name}"
    if here.suffix == ".ipynb" and name.suffix in (".md", ".ipynb"):
        page = "index.html" if name.stem == "README" else f"{Path(parts.path).stem}.html"
        end = f"#{parts.fragment}" if parts.fragment else ""
        return str(Path(parts.path).parent/page) + end
    return link


def with_links(text:str, here:Path, shown:set) -> str:
    "Markdown with the site's links."
    return LINK.sub(lambda m: m[1] + target_of(m[2], here, shown) + m[3], text)


def is_hidden(cell:dict) -> bool:
    "Is it a cell that the pages leave out?"
    return "".join(cell["source"]).startswith("#| hide")


def without_links_to_results(html:str, here:Path) -> str:
    "An output of the notebook `here`; files that its run wrote are named, not linked, because the site does not have them."
    def text_if_absent(match):
        parts = urlsplit(match[1])
        absent = not parts.scheme and not (ROOT/here.parent/unquote(parts.path)).exists()
        return match[2] if absent else match[0]
    return HTML_LINK.sub(text_if_absent, html)


def stage_outputs(cell:dict, here:Path):
    "Changes the outputs of a cell of the notebook `here` for the site."
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "text/html" in data:
            data["text/html"] = without_links_to_results("".join(data["text/html"]), here)


def stage(folder:Path):
    "Copies the sources with the site's links, and notebooks without the cells that they hide."
    files = sources()
    shown = set(files)
    for name in files:
        out = folder/name
        out.parent.mkdir(parents=True, exist_ok=True)
        if name.suffix == ".md":
            text = (ROOT/name).read_text(encoding="utf-8")
            out.write_text(with_links(text, name, shown), encoding="utf-8")
        elif name.suffix == ".ipynb":
            book = json.loads((ROOT/name).read_text(encoding="utf-8"))
            book["cells"] = [cell for cell in book["cells"] if not is_hidden(cell)]
            for cell in book["cells"]:
                if cell["cell_type"] == "markdown":
                    cell["source"] = with_links("".join(cell["source"]), name, shown)
                stage_outputs(cell, name)
            out.write_text(json.dumps(book), encoding="utf-8")
        else:
            shutil.copy(ROOT/name, out)


def navigation() -> list: # as in mkdocs.yml
    "The pages in the order in which a reader needs them, then the notebooks by folder."
    pages = sorted(p.stem for p in (ROOT/"docs").glob("*.md"))
    rest = [name for name in pages if name not in FIRST + THEN]
    measured = sorted(p.stem for p in (ROOT/"docs"/"measured").glob("*.md"))
    def of(names, folder="docs"):
        return [f"{folder}/{name}.md" for name in names]
    books = [p for p in sources() if p.suffix == ".ipynb"]
    rooms = {}
    for path in books:
        rooms.setdefault(str(path.parent), []).append(str(path))
    nav = [
        {"Home": "README.md"},
        {"First": of(FIRST)},
        {"Then": of(THEN)},
        {"To look up": of(rest)},
        {"How we know": of(measured, "docs/measured")},
    ]
    nav.append({"Notebooks": [{room: paths} for room, paths in sorted(rooms.items())]})
    nav.append({"Project": ["CONTRIBUTING.md", "CHANGELOG.md"]})
    return nav


def settings(source:Path, out:Path) -> dict: # as in mkdocs.yml
    "The settings of mkdocs."
    palette = [dict(media="(prefers-color-scheme: light)", scheme="default"),
               dict(media="(prefers-color-scheme: dark)", scheme="slate")]
    theme = dict(
        name="material",
        font=False,
        palette=palette,
        features=["navigation.tabs", "toc.follow"],
    )
    notebooks = {"mkdocs-jupyter": dict(execute=False, include_source=False)}
    return dict(
        site_name="qie_nb",
        repo_url=REPOSITORY,
        docs_dir=str(source),
        site_dir=str(out),
        use_directory_urls=False,
        theme=theme,
        nav=navigation(),
        plugins=["search", notebooks],
        markdown_extensions=[
            "tables",
            "pymdownx.superfences",
            "pymdownx.highlight",
            "sane_lists",
            "toc",
        ],
        validation=dict(links=dict(
            anchors="warn", absolute_links="warn", unrecognized_links="warn")),
    )


class Links(HTMLParser):
    "The links and the anchors of a page, without the theme's own list of sections."
    def __init__(self):
        super().__init__()
        self.links, self.anchors = [], set()

    def handle_starttag(self, tag, attrs):
        listed = dict(attrs).get("class") == "md-nav__link"
        for key, value in attrs:
            if not value:
                continue
            if key in ("id", "name"):
                self.anchors.add(value)
            if key in ("href", "src") and tag != "link" and not (listed and value.startswith("#")):
                self.links.append(value)


def dead_links(out:Path) -> list: # "page: link"
    "Links of the built pages to files or sections that the site does not have."
    pages = {}
    for path in sorted(out.rglob("*.html")):
        pages[path] = Links()
        pages[path].feed(path.read_text(encoding="utf-8"))
    dead = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue # its links begin at the site's address
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            to = (path.parent/unquote(parts.path)).resolve() if parts.path else path
            to = to/"index.html" if to.is_dir() else to
            section = unquote(parts.fragment)
            known = pages[to].anchors if to in pages else None
            if not to.exists() or section and known is not None and section not in known:
                dead.append(f"{path.relative_to(out)}: {link}")
    return sorted(set(dead))


def build(out:Path) -> int: # exit code
    "Builds the site and checks its links."
    import yaml
    with tempfile.TemporaryDirectory() as folder:
        source, config = Path(folder)/"source", Path(folder)/"mkdocs.yml"
        stage(source)
        config.write_text(yaml.safe_dump(settings(source, out.resolve())))
        options = ["--strict", "--quiet", "--config-file", config]
        command = [sys.executable, "-m", "mkdocs", "build", *options]
        code = subprocess.run(command, env=os.environ | dict(NO_MKDOCS_2_WARNING="1")).returncode
    if code:
        return code
    dead = dead_links(out)
    print("\n".join(["dead links:", *dead] if dead else [f"{out}/index.html: no dead links"]))
    return int(bool(dead))


def main():
    "The command line."
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, default=ROOT/"site")
    sys.exit(build(p.parse_args().out))


if __name__ == "__main__":
    main()
