"use strict";
(() => {
  const EVERY = 2000, PATIENCE = 5000;
  const lost = document.getElementById("lost");
  const said = document.getElementById("said");
  const build = (page) => page.documentElement.dataset.build;
  let timer = 0, running = false, since = null, title = document.title;

  const two = (number) => String(number).padStart(2, "0");
  const day = (at) => `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const clock = (at) => `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";

  // Without this script times are UTC.
  const localise = (main) => {
    const today = day(new Date());
    for (const time of main.querySelectorAll("time")) {
      const at = new Date(time.dateTime);
      time.title = time.dateTime;
      time.textContent = day(at) === today ? clock(at) : `${day(at)} ${clock(at).slice(0, 5)}`;
    }
    for (const name of main.querySelectorAll(".zone")) name.textContent = zone;
  };

  // The text on screen stays where it is when lines above it are added or removed.
  const read = (main) => {
    if (scrollY < 1) return null;
    for (const { id } of main.querySelectorAll("article[id], section[id] > h2, li a[id]")) {
      const top = document.getElementById(id)?.getBoundingClientRect().top ?? -1;
      if (id && top >= 0) return { id, top };
    }
    return null;
  };

  // A selection must not move while the user is copying it.
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
    localise(fresh);
    const place = read(main);
    main.replaceWith(document.adoptNode(fresh));
    const moved = place && document.getElementById(place.id)?.getBoundingClientRect().top;
    if (moved != null && moved !== place.top) scrollBy({ top: moved - place.top, behavior: "instant" });
    if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
    title = page.title;
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
      since ??= new Date();
    }
    running = false;
    document.body.classList.toggle("old", since !== null);
    lost.hidden = since === null;
    document.title = since ? `? - ${document.querySelector("h1").textContent}` : title;
    const words = since && lost.dataset.words.replace("{}", clock(since));
    if (since && lost.textContent !== words) lost.textContent = words;
    if (!document.hidden) timer = setTimeout(update, EVERY);
  };

  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (!document.hidden) update();
  });
  localise(document.querySelector("main"));
  said.textContent = document.getElementById("headline").textContent;
  if (!document.hidden) timer = setTimeout(update, EVERY);
})();
