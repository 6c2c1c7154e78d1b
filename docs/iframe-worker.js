// Search in a site that is read from disk. A browser starts no worker from a file there, so the worker's script runs in a
// hidden frame. The name is the one by which the plugin "offline" knows that it need not load such a script from unpkg.com.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inner = frame.contentWindow
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.inner.document.createElement("script")
      script.src = url
      this.loaded = new Promise((resolve, reject) => Object.assign(script, { onload: resolve, onerror: reject }))
      this.inner.document.body.append(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
