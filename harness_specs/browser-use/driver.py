"""Runs a browser-use agent on one instruction, with a headless Chromium: ``driver.py INSTRUCTION``.

FORGE_BASE_URL, FORGE_KEY and FORGE_MODEL say where the model is. The work folder is served on PAGES, which is where
the browser begins when there is an ``index.html``. What the agent says at its end becomes ``answer.txt`` in the work
folder, unless that exists. BROWSER_USE_VISION and BROWSER_USE_JUDGE are ``on`` or ``off``. Ends with 0 when the agent
says that it is done, else with 1, and with 3 when there is no browser.
"""

import asyncio
import functools
import os
import shutil
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from browser_use import Agent, BrowserProfile
from browser_use.agent.views import AgentHistoryList
from browser_use.llm import ChatOpenAI

ANSWER = Path("answer.txt")
PAGES = ("127.0.0.1", 8000)
STEPS = 1000  # the run's budgets count
PATIENCE_S = 590  # with one call: weight updates hold it
# the binary itself first: Debian's wrapper around it reads files in /etc that a sandbox may not show
BROWSERS = ("/usr/lib/chromium/chromium", "chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = (
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--no-first-run",
    "--no-pings",
    # no name is ever asked for: what is not on this machine does not exist
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """The log is the agent's."""


def serve(folder: Path) -> str:
    """Serve the folder for as long as the program lives; its address."""
    server = ThreadingHTTPServer(PAGES, functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://{PAGES[0]}:{PAGES[1]}/"


async def browse(task: str, browser: str, pages: str, *, begin: bool) -> AgentHistoryList:
    """Let the agent work until it is done or fails; with ``begin`` it finds the first page open."""
    env, home = os.environ, Path(os.environ["HOME"])
    llm = ChatOpenAI(
        model=env["FORGE_MODEL"],
        base_url=f"{env['FORGE_BASE_URL']}/v1",
        api_key=env.pop("FORGE_KEY"),
        timeout=PATIENCE_S,
        # a grammar is no plain sampling and not trained; so the schema of the answer stands in the prompt instead
        add_schema_to_system_prompt=True,
        dont_force_structured_output=True,
    )
    profile = BrowserProfile(
        headless=True,
        executable_path=browser,
        chromium_sandbox=False,  # no namespaces within the attempt's own
        user_data_dir=str(home / "chromium"),
        enable_default_extensions=False,  # they would be downloaded
        args=list(QUIET),
        window_size={"width": 1024, "height": 768},
        viewport={"width": 1024, "height": 768},
    )
    agent = Agent(
        task=f"{task}\n\nThe files of the task are served at {pages}; there is no other network.",
        llm=llm,
        browser_profile=profile,
        initial_actions=[{"navigate": {"url": pages, "new_tab": False}}] if begin else None,
        use_vision=env["BROWSER_USE_VISION"] == "on",
        use_judge=env["BROWSER_USE_JUDGE"] == "on",
        file_system_path=str(home / "files"),
        llm_timeout=PATIENCE_S + 5,
        step_timeout=PATIENCE_S + 120,
        directly_open_url=False,
    )
    return await agent.run(max_steps=STEPS)


def main() -> int:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        print("there is no Chromium: install it (Debian: apt-get install chromium)", file=sys.stderr)
        return 3
    pages = serve(Path.cwd())
    history = asyncio.run(browse(sys.argv[1], browser, pages, begin=Path("index.html").exists()))
    answer = history.final_result()
    if answer is not None and not ANSWER.exists():
        ANSWER.write_text(answer)
    return 0 if history.is_done() else 1


sys.exit(main())
