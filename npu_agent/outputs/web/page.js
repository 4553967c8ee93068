"use strict";
(() => {
  const EVERY = 2000, PATIENCE = 5000;
  const lost = document.getElementById("lost");
  const said = document.getElementById("said");
  const build = (page) => page.documentElement.dataset.build;
  let timer = 0, running = false, since = null;

  // What somebody marks to copy it must not be pulled from under the mouse.
  const marking = (main) => {
    const selection = getSelection();
    return !selection.isCollapsed && selection.containsNode(main, true);
  };

  const show = (page) => {
    const main = document.querySelector("main"), fresh = page.querySelector("main");
    if (!fresh) throw new Error("no status page");
    if (build(page) !== build(document)) return location.reload();
    if (marking(main)) return;
    const focus = main.contains(document.activeElement) ? document.activeElement.id : "";
    for (const { id } of main.querySelectorAll("details[open]"))
      fresh.querySelector(`#${CSS.escape(id)}`)?.setAttribute("open", "");
    main.replaceWith(document.adoptNode(fresh));
    if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
    document.title = page.title;
    const headline = document.getElementById("headline").textContent;
    if (said.textContent !== headline) said.textContent = headline;
  };

  const update = async () => {
    if (running) return;
    running = true;
    clearTimeout(timer);
    try {
      const answer = await fetch(location.pathname, {
        cache: "no-store", signal: AbortSignal.timeout(PATIENCE), headers: { Accept: "text/html" },
      });
      if (!answer.ok) throw new Error(answer.statusText);
      show(new DOMParser().parseFromString(await answer.text(), "text/html"));
      since = null;
    } catch {
      since ??= new Date().toISOString().slice(11, 19);
    }
    running = false;
    document.body.classList.toggle("old", since !== null);
    if (lost.hidden !== (since === null)) {
      lost.textContent = since && `Connection lost at ${since} UTC: this page is out of date. Retrying.`;
      lost.hidden = since === null;
    }
    if (!document.hidden) timer = setTimeout(update, EVERY);
  };

  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (!document.hidden) update();
  });
  said.textContent = document.getElementById("headline").textContent;
  if (!document.hidden) timer = setTimeout(update, EVERY);
})();
