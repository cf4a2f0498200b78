// The search of the theme runs in a worker. A browser starts no worker for a page that was opened
// as a file, so there a hidden frame does the same work.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...urls) =>
        urls.reduce((loaded, each) => loaded.then(() => this.load(each)), Promise.resolve());
      this.started = this.load(url);
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = () => reject(new Error(`cannot load ${url}`));
        this.inside.document.body.append(script);
      });
    }

    postMessage(data) {
      this.started.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inside.frameElement.remove();
    }

    set onmessage(receive) {
      this.addEventListener("message", receive);
    }
  };
  window.Worker = window.IFrameWorker;
}
