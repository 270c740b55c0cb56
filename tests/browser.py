"""The site of the docs in a browser."""

import contextlib
import functools
import http.server
import shutil
import threading

import pytest

BROWSER = next(filter(None, map(shutil.which, ["chromium", "google-chrome"])), None)


class Handler(http.server.SimpleHTTPRequestHandler):
    def end_headers(self):
        self.send_header("LinkChecker", "")  # it then need not pause between requests
        super().end_headers()

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def served(folder):
    handler = functools.partial(Handler, directory=folder)
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://localhost:{server.server_port}"
        finally:
            server.shutdown()


@contextlib.contextmanager
def browser_of(site):
    """Yields a tab of a browser, and the address of the site."""
    from playwright.sync_api import sync_playwright

    if not BROWSER:
        pytest.skip("get the browser test with: sudo apt-get install chromium (or Chrome)")
    with served(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 1280, "height": 900}), address
        browser.close()
