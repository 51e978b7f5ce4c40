// Light or dark, before anything is drawn: as the user chose here, else as the system is set.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  const show = () => {
    root.dataset.theme = chosen() || (system.matches ? "dark" : "light");
    dispatchEvent(new Event("theme"));
  };
  show();
  system.addEventListener("change", show);
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-theme-toggle]")) return;
    try { localStorage.setItem("theme", root.dataset.theme === "dark" ? "light" : "dark"); } catch { return; }
    show();
  });
})();
