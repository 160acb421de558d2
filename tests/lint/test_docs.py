"""Settings, commands, messages and files that README and docs/ name exist."""
import importlib.util, json, re, shlex, sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from qie_nb.cli import parser
from qie_nb.config import describe, make_config
from qie_nb.core.presets import LENGTHS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT/"tools"))
import quotes, website

PAGES = sorted(p.stem for p in (ROOT/"docs").glob("*.md"))
MEASURED = sorted(f"measured/{p.stem}" for p in (ROOT/"docs"/"measured").glob("*.md"))
WRITTEN = ["../README", *(p for p in PAGES if p != "refusals"), *MEASURED] # that one is generated
GENERATED = ("options", "claims", "peers", "refusals") # these and tables may be longer
SECTIONS = "model|data|train|cache|predict|optimizer|lr_scheduler|logging"
read = lambda page: (ROOT/"docs"/f"{page}.md").read_text()
each_page = pytest.mark.parametrize("page", WRITTEN)


@cache
def known() -> set: return {".".join(name.split(".")[:n]) for name, *_ in describe() for n in range(1, 5)}


def unknown_settings(text): return {n for n in re.findall(rf"`(?:[^`]*[\s(])?((?:{SECTIONS})\.[a-z0-9_.]+[a-z0-9_])", text) if n not in known() and not n.endswith(".md")}


@each_page
def test_settings_exist(page): assert not unknown_settings(read(page))


def test_unknown_settings_are_found():
    assert unknown_settings("`train.max_hour: 8`") == {"train.max_hour"} and unknown_settings("set `train.max_hours: 8` x") == set()


def test_the_recipe_is_a_configuration():
    blocks = re.findall(r"```yaml\n(.*?)```", read("recipes"), re.S)
    assert blocks
    for b in blocks:
        c = make_config(yaml.safe_load(b))
        assert c.model.lora.r == 16 and c.optimizer.lr == 1e-4
        for length in LENGTHS:
            assert not getattr(c.train, length), "the recommended one is for all numbers of pairs"


@each_page
def test_commands_exist(page):
    text = read(page)
    for c in re.findall(r"`(qie-nb [^`]+)`", text) + re.findall(r"^(qie-nb .*)$", text, re.M):
        words = shlex.split(c, comments=True)[1:]
        if len(words) > 1 and not {"|", "..."} & {*words}: parser().parse_args(words)
    with pytest.raises(SystemExit): parser().parse_args(shlex.split("qie-nb plan --gpuu T4")[1:])


@pytest.mark.parametrize("page", quotes.PAGES)
def test_messages_are_quoted_exactly(page):
    found = quotes.quoted(read(page))
    assert len(found) >= (8 if page == "kaggle" else 3)
    assert not [m for m in found if not quotes.in_code(m)]


# --- links
REPOSITORY = "https://github.com/qie-nb/qie_nb/blob/main/" # a link to a file of this repository


def anchors(path:Path) -> set:
    "The sections of a page, as GitHub names them."
    return {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-")
            for h in re.findall(r"^#+ (.*)", path.read_text(), re.M)}


def dead_links(text:str, here:Path) -> list:
    "Targets of links and images in Markdown at `here` that do not exist."
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, section = target.partition("#")
        if file.startswith(REPOSITORY):
            path = ROOT/file.removeprefix(REPOSITORY)
        elif "://" in file or file.startswith("mailto:"):
            continue
        else:
            path = (here.parent/file).resolve() if file else here
        if not path.exists() or section and path.suffix == ".md" and section not in anchors(path):
            dead.append(target)
    return dead


@pytest.mark.parametrize("page", [*WRITTEN, "refusals", "../CONTRIBUTING"])
def test_links_exist(page):
    path = (ROOT/"docs"/f"{page}.md").resolve()
    assert not dead_links(path.read_text(), path)


def test_links_in_notebooks_exist():
    dead = {}
    for path in [*(ROOT/"nbs").rglob("*.ipynb"), *(ROOT/"kaggle").rglob("*.ipynb")]:
        if ".ipynb_checkpoints" in path.parts:
            continue
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] != "markdown":
                continue
            found = dead_links("".join(cell["source"]), path)
            if found:
                dead[str(path.relative_to(ROOT))] = found
    assert not dead


def test_dead_links_are_found(tmp_path):
    page = tmp_path/"a.md"
    page.write_text("# A title\n")
    text = "[a](a.md) [b](b.md) [c](#a-title) [d](a.md#b) [e](https://x.y/z) "
    text += f"[f]({REPOSITORY}README.md) [g]({REPOSITORY}no.md)"
    assert dead_links(text, page) == ["b.md", "a.md#b", f"{REPOSITORY}no.md"]


def test_pages_name_pages_that_exist_in_code():
    "Comments and messages name pages by their path."
    named = {}
    for folder in ("qie_nb", "tools", "benchmarks", "tests", "kaggle"):
        for path in (ROOT/folder).rglob("*.py"):
            for page in re.findall(r"\bdocs/([\w/]+\.md)", path.read_text()):
                named.setdefault(page, path.name)
    assert named
    assert not {page: name for page, name in named.items() if not (ROOT/"docs"/page).is_file()}


@pytest.mark.parametrize("page", PAGES + MEASURED)
def test_pages_open_with_what_they_answer(page):
    title, gap, first, *_ = read(page).splitlines()
    assert title.startswith("# ") and not gap and re.match(r"[A-Z][^#|`!*-].{40,}[.:?!]", first), "one sentence below the title: what does this page answer?"


def test_readme_links_every_page():
    assert not set(PAGES) - {*re.findall(r"\]\(docs/(\w+)\.md", read("../README"))}


def test_each_page_of_measurements_is_linked_from_a_page():
    linked = {name for page in PAGES for name in re.findall(r"\]\((measured/\w+)\.md", read(page))}
    assert not set(MEASURED) - linked


# --- the script for rented machines
def test_the_job_of_the_page_is_one_that_the_script_takes():
    spec = importlib.util.spec_from_file_location("job", ROOT/"kaggle"/"job.py")
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    commands = re.findall(r"^.*job\.py (--.*)$", read("jobs"), re.M)
    assert len(commands) == 2
    for command in commands:
        a = job.parser().parse_args(shlex.split(command))
        c = make_config(job.settings(a.preset, Path(a.pairs), Path(a.work), a.prompt, a.steps))
        assert c.train.max_train_steps == a.steps and c.data.prompt == a.prompt
    tomllib = pytest.importorskip("tomllib")
    script = (ROOT/"kaggle"/"job.py").read_text()
    header = re.search(r"^# /// script$(.*?)^# ///$", script, re.M | re.S)[1]
    assert tomllib.loads(re.sub(r"^# ?", "", header, flags=re.M))["dependencies"] == [
        "qie_nb[nf4] @ git+https://github.com/qie-nb/qie_nb"]


# --- the site
def test_the_site_has_every_page_and_notebook():
    shown = json.dumps(website.navigation())
    pages = [str(p) for p in website.sources() if p.suffix in (".md", ".ipynb")]
    assert not [page for page in pages if page not in shown]


def test_links_of_the_site():
    shown = {Path("README.md"), Path("docs/speed.md"), Path("nbs/index.ipynb")}
    def of(link, here): return website.target_of(link, Path(here), shown)
    assert of("../docs/speed.md#rates", "nbs/index.ipynb") == "../docs/speed.html#rates"
    assert of("docs/speed.md", "README.md") == "docs/speed.md" and of("#a", "README.md") == "#a"
    assert of("LICENSE", "README.md") == f"{website.REPOSITORY}/blob/main/LICENSE"
    assert of("https://x.y/z.md", "nbs/index.ipynb") == "https://x.y/z.md"
    assert of("no.md", "README.md") == "no.md"


def test_dead_links_of_the_site_are_found(tmp_path):
    (tmp_path/"b").mkdir()
    (tmp_path/"b"/"index.html").write_text('<h1 id="there">B</h1>')
    (tmp_path/"a.html").write_text(
        '<a href="b/#there"></a><a href="b/index.html#gone"></a><img src="no.png">'
        '<a class="md-nav__link" href="#theirs"></a><a href="https://x.y"></a>')
    assert website.dead_links(tmp_path) == ["a.html: b/index.html#gone", "a.html: no.png"]


def links_of_outputs(folder): # of its notebooks
    linked = []
    for path in folder.rglob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            for output in cell.get("outputs", []):
                html = "".join(output.get("data", {}).get("text/html", ""))
                linked += [(path.name, link) for link in re.findall('href="([^"]+)', html)]
    return linked


def test_outputs_of_the_site_link_to_no_file_of_the_run_that_made_them(tmp_path):
    "A reader of the site has not run it."
    website.stage(tmp_path)
    assert [link for name, link in links_of_outputs(ROOT/"nbs") if name == "index.ipynb"]
    assert [row for row in links_of_outputs(tmp_path) if "://" not in row[1] and row[1][0] != "#"] == []
    shown = '<i>LoRA</i> <a href="lora/README.md" target="_blank">lora/README.md</a>'
    assert website.without_links_to_results(shown, Path("nbs/index.ipynb")) == "<i>LoRA</i> lora/README.md"
    there = '<a href="00_cache.ipynb">the cache</a> <a href="https://pytorch.org">torch</a>'
    assert website.without_links_to_results(there, Path("nbs/index.ipynb")) == there


def test_the_tour_says_where_to_look():
    "Each name of its last section is defined by the module of the notebook that is linked beside it."
    cells = json.loads((ROOT/"nbs"/"index.ipynb").read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    section = next(text for text in texts if text.startswith("## Where to look"))
    tasks = re.split(r"^- ", section, flags=re.M)[1:]
    assert len(tasks) == 5
    for task in tasks:
        linked = re.findall(r"\]\(([^)]+)\),\s+`([A-Za-z_]+)", task)
        assert linked, task
        for notebook, name in linked:
            source = (ROOT/"nbs"/notebook).read_text()
            assert re.search(rf"(def|class) {name}\b", source), f"{notebook} does not define {name}"


# --- words
def words(text:str, generated:bool=True) -> int:
    "As `wc -w` counts; without `generated`, what scripts write between their marks does not count."
    if not generated:
        text = re.sub(r"<!-- [^>]*: made by .*?<!-- end -->", "", text, flags=re.S)
    return len(text.split())


def test_words_are_counted():
    text = "one two\n<!-- a: made by b.py -->\n| three | four |\n<!-- end -->\nfive"
    assert words("one two | three") == 4 and words(text, generated=False) == 3 and words(text) > 10


def test_pages_are_short():
    "What no reader needs goes; how we know it is in docs/measured/."
    assert words(read("../README")) <= 1000
    assert words(read("refusals")) <= 1200
    written = {page: words(read(page), generated=False) for page in PAGES if page not in GENERATED}
    long = {page: n for page, n in written.items() if n > 900}
    assert not long, f"more than 900 words, tables of scripts not counted: {long}"
    assert sum(words(read(page)) for page in PAGES) <= 14_000, "docs/*.md together"
    assert sum(words(read(page)) for page in MEASURED) <= 10_000, "docs/measured/*.md together"


@each_page
def test_table_rows_have_equal_length(page):
    for table in re.findall(r"(?:^\|.*\n)+", read(page), re.M):
        counts = {len(re.sub(r"`+[^`]*`+", "", row).split("|")) for row in table.splitlines()}
        assert len(counts) == 1, table[:200]


# --- claims
def claims() -> list: # (claim, page, what supports it)
    found, page = [], ""
    for line in read("claims").splitlines():
        heading, row = re.match(r"## \[([\w/]+)\]", line), re.match(r"- \*(.*)\* (.*)$", line)
        if heading:
            page = heading[1]
        if row:
            found.append((row[1], page, row[2]))
    return found


def page_text(name) -> str:
    text = (ROOT/"README.md" if name == "README" else ROOT/"docs"/f"{name}.md").read_text()
    return " ".join(text.replace("\n> ", " ").replace("**", "").split())


def test_each_claim_is_in_its_page_and_has_its_support():
    found, named = claims(), 0
    for claim, page, support in found:
        assert claim in page_text(page), (claim, page)
        for path in re.findall(r"`((?:tests|benchmarks)/[^`]+)`", support):
            file, _, test = path.partition("::")
            assert (ROOT/file).is_file() and (not test or f"def {test}(" in (ROOT/file).read_text()), path
            named += 1
        assert "`" in support or support == "the same"
    assert len(found) > 35 and named > 50


def test_each_bold_sentence_is_a_claim_or_a_heading():
    "Bold words of up to five words, or at the beginning of a paragraph, are names and headings."
    known = " ".join(c for c, *_ in claims())
    lists = ("claims", "security", "options", "refusals", "glossary")
    for page in ("README", *(p for p in [*PAGES, *MEASURED] if p not in lists)):
        text = (ROOT/"README.md" if page == "README" else ROOT/"docs"/f"{page}.md").read_text()
        for m in re.finditer(r"\*\*([^*]+)\*\*", text):
            words, before = " ".join(m[1].split()).strip("."), text[:m.start()].rpartition("\n")[2]
            heading = not before.strip("-> 0123456789.") and page != "README"
            assert heading or len(words.split()) < 6 or words in known or all(part.strip() in known for part in words.split(",", 1)), (page, words)


# --- the security page
def test_the_security_page_names_tests_that_exist():
    page = read("security")
    named = {(file, name) for file, names in re.findall(r"(tests/[\w/]+\.py):\s+([\w,\s]+)", page) for name in re.split(r",\s+", names)}
    assert len(named) > 20
    missing = [f"{file}: {name}" for file, name in named if not re.search(rf"^def (test_)?{name}\(", (ROOT/file).read_text(), re.M)]
    assert not missing, missing
    own = set(re.findall(r"^def test_(\w+)\(", (ROOT/"tests"/"test_security.py").read_text(), re.M))
    assert own <= {name for file, name in named if file == "tests/test_security.py"}, "the page names every test of that file"
