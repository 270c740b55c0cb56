// A page that is opened as a file may start no worker, and the search is one: an iframe runs it.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.scope = this.frame.contentWindow;
      this.scope.document.open();
      this.scope.document.close();
      this.scope.postMessage = (data) => this.send(data, (event) => this.onmessage?.(event));
      const script = this.scope.document.createElement("script");
      this.loaded = new Promise((resolve) => (script.onload = resolve));
      script.src = url;
      this.scope.document.body.append(script);
    }
    async send(data, receive) {
      const copy = structuredClone(data);
      await this.loaded;
      setTimeout(() => receive({ data: copy }));
    }
    postMessage(data) {
      this.send(data, (event) => this.scope.onmessage(event));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
