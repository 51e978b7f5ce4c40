// Ticks of live parts, the banner when nobody answers, dialogs, and times of the user's own zone.
(() => {
  const root = document.documentElement;
  const every = Number(root.dataset.refresh);
  const banner = document.getElementById("banner");
  const dialog = document.getElementById("dialog");
  let digest = "", since = null, problem = "", focused = null;

  const localTimes = (part) => part.querySelectorAll("time[datetime]").forEach((one) => {
    const at = new Date(one.dateTime);
    one.textContent = at.toLocaleString("sv-SE");
  });

  const say = (text) => {
    if (text && !since) since = new Date();
    if (!text) since = null;
    problem = text;
    banner.hidden = !text;
    banner.textContent = text && `${text} – what you see is of ${since.toLocaleTimeString("en-GB")}; this page goes on by itself.`;
    document.body.classList.toggle("stale", !!text);
  };

  const isLive = (event) => event.detail.target?.id === "live" || event.detail.elt?.id === "live";

  document.addEventListener("htmx:configRequest", (event) => {
    const { elt, headers } = event.detail;
    if (elt.id === "live") headers["X-Seen"] = digest;
  });
  document.addEventListener("htmx:beforeSwap", (event) => {
    const { target, xhr } = event.detail;
    if (target.id === "live") {
      const active = document.activeElement;
      focused = target.contains(active) ? active.getAttribute("href") || active.id : null;
    }
    // What a request without a dialog brings for one: the whole page, as without a script.
    if (xhr.getResponseHeader("HX-Redirect")) event.detail.shouldSwap = false;
  });
  document.addEventListener("htmx:afterSwap", (event) => {
    const { target, xhr } = event.detail;
    localTimes(target);
    if (target.id === "live") {
      digest = xhr.getResponseHeader("X-Digest") || "";
      if (focused) target.querySelector(`[href="${CSS.escape(focused)}"], [id="${CSS.escape(focused)}"]`)?.focus();
    }
    if (target.id === "dialog") {
      if (!dialog.open) dialog.showModal();
      (dialog.querySelector("[autofocus]") || dialog.querySelector("input:not([type=hidden]), select, textarea, button"))?.focus();
    }
  });
  document.addEventListener("htmx:afterRequest", (event) => {
    if (!isLive(event)) return;
    const { xhr, successful } = event.detail;
    if (successful || (xhr && xhr.status >= 200 && xhr.status < 400)) return say("");
    if (!xhr || xhr.status === 0) return say("The console does not answer");
    say(decodeURIComponent(xhr.getResponseHeader("Mqmesh-Problem") || "") || `The console answers ${xhr.status}`);
  });

  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-close]")) {
      if (dialog.open) dialog.close(); else history.back();
    }
    const copied = event.target.closest("[data-copy]");
    if (copied) navigator.clipboard?.writeText(copied.dataset.copy);
  });
  dialog.addEventListener("close", () => { dialog.replaceChildren(); tick(); });
  document.addEventListener("input", (event) => {
    const typed = event.target.closest("[data-typed]");
    if (typed) typed.form.querySelector("[value=do]").disabled = typed.value !== typed.dataset.typed;
  });

  document.addEventListener("change", (event) => {
    const all = event.target.closest("[data-all]");
    if (all) all.form.querySelectorAll(`[name="${all.dataset.all}"]`).forEach((one) => { one.checked = all.checked; });
  });

  // An action may remove what the page shows; then its outcome leads to another page.
  const isLeaving = () => dialog.querySelector("form.htmx-request, a.primary");
  const tick = () => {
    if (document.hidden || isLeaving()) return;
    htmx.trigger(document.body, "tick");
    if (document.querySelector("[data-retry]")) {
      fetch(location.href).then((answer) => answer.ok && location.reload(), () => {});
    }
  };
  setInterval(tick, every);
  document.addEventListener("visibilitychange", tick);
  localTimes(document);
})();
