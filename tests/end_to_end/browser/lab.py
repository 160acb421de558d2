"""A separate JupyterLab on a loopback port, and a headless Chromium that opens and runs notebooks in it."""
import json, os, secrets, shutil, socket, subprocess, sys, time, urllib.request
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 600 # seconds for a process or a cell: on a busy machine they take ten times as long
SETTINGS = {
    "apputils-extension/notification": dict(fetchNews="false", checkForUpdates=False),
    "notebook-extension/tracker": dict(windowingMode="none"),
    "docmanager-extension/plugin": dict(autosave=False),
}
HOMES = dict(HOME="", JUPYTERLAB_SETTINGS_DIR="settings", JUPYTER_CONFIG_DIR="config", JUPYTER_DATA_DIR="data", JUPYTER_RUNTIME_DIR="runtime",
             IPYTHONDIR="ipython", JUPYTERLAB_WORKSPACES_DIR="workspaces", TMPDIR="tmp")


def chromium() -> str: # path
    given = os.environ.get("QIE_NB_CHROMIUM")
    found = shutil.which(given) if given else shutil.which("chromium") or shutil.which("chromium-browser")
    if not found: raise RuntimeError("these tests need Chromium: `apt-get install -y chromium` on Debian, or set QIE_NB_CHROMIUM to the path of another Chromium or Chrome")
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Lab:
    "JupyterLab for a folder of notebooks, with its settings, run-time files and log in `home` instead of the user's."
    def __init__(self, folder, home):
        self.folder, self.home, self.token, self.port = Path(folder), Path(home), secrets.token_hex(16), free_port()
        self.url = f"http://127.0.0.1:{self.port}/"

    def __enter__(self):
        for name, values in SETTINGS.items():
            file = self.home/"settings"/"@jupyterlab"/f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = os.environ | {name: str(self.home/folder) for name, folder in HOMES.items()} | dict(PYTHONPATH=paths, OMP_WAIT_POLICY="passive", TOKENIZERS_PARALLELISM="false")
        env.pop("JUPYTER_PATH", None)
        (self.home/"tmp").mkdir(exist_ok=True)
        self.log = (self.home/"server.log").open("ab")
        self.server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={self.port}", "--ServerApp.port_retries=0", "--allow-root",
             f"--ServerApp.token={self.token}", f"--ServerApp.root_dir={self.folder}", "--LabApp.expose_app_in_browser=True"],
            env=env, cwd=self.folder, stdout=self.log, stderr=self.log, start_new_session=True)
        end = time.time() + PATIENCE
        while True:
            try: urllib.request.urlopen(f"{self.url}api?token={self.token}", timeout=60).close(); return self
            except OSError:
                if self.server.poll() is None and time.time() < end: time.sleep(0.2); continue
                self.__exit__()
                raise RuntimeError(f"JupyterLab did not start:\n{(self.home/'server.log').read_text()[-3000:]}") from None

    def __exit__(self, *exc):
        self.server.terminate() # and its kernels
        try: self.server.wait(200)
        except subprocess.TimeoutExpired: self.server.kill(); self.server.wait()
        self.log.close()


APP = "(window.jupyterapp || window.jupyterlab)"
STATE = f"""() => {{
  const panel = {APP}?.shell.currentWidget, kernel = panel?.sessionContext?.session?.kernel;
  if (!kernel || !panel.content.model) return null;
  const prompts = [...panel.node.querySelectorAll('.jp-InputPrompt')].map(n => n.textContent);
  return {{status: kernel.status, waiting: prompts.filter(t => t.includes('*')).length}};
}}"""


class Page:
    "One notebook in the browser."
    def __init__(self, browser, lab, name, out, scale=1):
        self.lab, self.name, self.out, self.console = lab, name, Path(out), []
        self.page = browser.new_page(viewport=dict(width=1280, height=1600), device_scale_factor=scale)
        self.page.set_default_timeout(300_000)
        self.page.on("console", lambda m: self.console.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda e: self.console.append(f"uncaught: {e}"))
        self.page.goto(f"{lab.url}lab/tree/{name}?reset&token={lab.token}", wait_until="domcontentloaded")

    def kernel(self):
        "Wait for the notebook and its kernel."
        self.page.wait_for_function(f"() => ({STATE})()?.status === 'idle'", timeout=PATIENCE * 1000)
        return self

    def save(self): self.page.evaluate(f"async () => {{ await {APP}.commands.execute('docmanager:save'); }}")

    def run_all(self, wait=True, seconds=2 * PATIENCE):
        self.page.evaluate(f"() => {{ {APP}.commands.execute('notebook:run-all-cells'); }}")
        return self.finished(seconds) if wait else self

    def finished(self, seconds=2 * PATIENCE):
        "Wait until no cell is waiting."
        self.page.wait_for_timeout(300)
        self.page.wait_for_function(f"() => {{ const s = ({STATE})(); return s && s.status === 'idle' && !s.waiting; }}", timeout=seconds * 1000, polling=200)
        return self

    def until(self, condition, what, seconds=300):
        "Wait for a condition that is not of the page alone."
        end = time.time() + seconds
        while not condition():
            if time.time() > end: raise TimeoutError(f"waited {seconds} s until {what}")
            self.page.wait_for_timeout(200)
        return self

    def notebook(self) -> dict: return self.page.evaluate(f"() => {APP}.shell.currentWidget.content.model.toJSON()")

    def outputs(self) -> list: return [o for c in self.notebook()["cells"] for o in c.get("outputs", ())]

    def errors(self) -> list: return [f"{o['ename']}: {o['evalue']}" for o in self.outputs() if o["output_type"] == "error"]

    def keep(self, what):
        "Write a screenshot and the text of the page."
        self.out.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=self.out/f"{what}.png")
        (self.out/f"{what}.txt").write_text("\n".join(["console:", *self.console, "", "page:", self.page.inner_text("body")]))
        return self.out/f"{what}.png"

    def close(self):
        "Close the page and end its kernel."
        self.page.close()
        ask = lambda path, method="GET": urllib.request.urlopen(urllib.request.Request(f"{self.lab.url}api/{path}?token={self.lab.token}", method=method), timeout=PATIENCE)
        if self.lab.server.poll() is not None: return
        for s in json.load(ask("sessions")):
            if s["path"] == self.name: ask(f"sessions/{s['id']}", "DELETE").close()


@contextmanager
def chrome():
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-dev-shm-usage"])
        try: yield browser
        finally: browser.close()


if __name__ == "__main__": # checks that there is a browser
    try: print("browser:", chromium())
    except RuntimeError as e: sys.exit(str(e))
