// Plays what all ranks of a training did, line by line: what tools/watch has recorded.
for (const player of document.querySelectorAll(".watch")) {
  // The HTML of the script's lines; of each attempt, the events of each rank; how the run ended.
  const recordings = JSON.parse(player.querySelector("script").textContent);
  const element = (tag, properties, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const button = (text, label) => element("button", { type: "button", textContent: text, ariaLabel: label });
  const choice = element("select", { ariaLabel: "Script" });
  choice.append(...Object.keys(recordings).map((name) => element("option", { textContent: name })));
  const back = button("◀", "One step back");
  const play = button("Play");
  const forward = button("▶", "One step forward");
  const jump = button("Next collective");
  const slider = element("input", { type: "range", min: 0, value: 0, ariaLabel: "Position" });
  const says = element("p", { className: "says", role: "status" });
  const code = element("code", { tabIndex: 0 });
  const ranksAt = element("ul");
  const table = element("table", { className: "values" });
  const log = element("pre", { className: "log", tabIndex: 0 });
  let [recording, ticks, rows, timer] = [null, [], [], null];

  // In a tick each rank begins its next line, unless it is in a collective that another rank has
  // not reached: then it waits. The last tick is where no rank can go on.
  function order({ attempts, end }) {
    const result = [];
    for (const ranks of attempts) {
      const at = ranks.map(() => 0);
      for (;;) {
        const events = at.map((position, rank) => ranks[rank][position]);
        if (events.every((event) => !event)) break;
        const inside = events.map((event) => event?.[1]);
        const meet = new Set(inside).size === 1 && inside[0] ? inside[0] : "";
        const waits = inside.map((collective) => Boolean(collective) && !meet);
        result.push({ ranks, at: [...at], waits, meet, stuck: false });
        const go = events.map((event, rank) => event && !waits[rank]);
        if (!go.includes(true)) {
          result.at(-1).stuck = end === "hangs";
          break;
        }
        go.forEach((moves, rank) => (at[rank] += moves ? 1 : 0));
      }
    }
    return result;
  }

  // The values and the log of each rank at a tick, and which of them are new.
  function values(tick) {
    return tick.ranks.map((events, rank) => {
      const found = {};
      let printed = "";
      events.slice(0, tick.at[rank] + 1).forEach(([, , changed], k) => {
        for (const [name, value] of Object.entries(changed)) {
          if (name === "log") printed += value;
          else found[name] = { value, fresh: k === tick.at[rank] };
        }
      });
      return { found, printed };
    });
  }

  const chip = (rank, waits) =>
    element("span", { className: `chip rank-${rank % 4}${waits ? " waiting" : ""}`, textContent: rank });

  function explain({ ranks, at, waits, meet, stuck }) {
    if (meet) return `All ranks are in a collective: ${meet}.`;
    const waiting = at.flatMap((position, rank) =>
      waits[rank] ? [`Rank ${rank} waits in line ${ranks[rank][position][0]}: ${ranks[rank][position][1]}.`] : [],
    );
    const ended = at.flatMap((position, rank) => (ranks[rank][position] ? [] : [`Rank ${rank} has ended.`]));
    if (stuck) return [...waiting, ...ended, "They do not match: the run hangs here for ever."].join(" ");
    return [...waiting, ...ended].join(" ") || "Each rank runs a line of its own.";
  }

  function show(number) {
    const now = Math.max(0, Math.min(ticks.length - 1, number));
    const tick = ticks[now];
    slider.value = now;
    slider.ariaValueText = `step ${now} of ${ticks.length - 1}`;
    rows.forEach((row) => row.firstChild.replaceChildren());
    code.querySelectorAll(".now").forEach((row) => row.classList.remove("now"));
    const places = tick.at.map((position, rank) => {
      const event = tick.ranks[rank][position];
      if (event) {
        rows[event[0] - 1].firstChild.append(chip(rank, tick.waits[rank]));
        rows[event[0] - 1].classList.add("now");
      }
      const line = event ? rows[event[0] - 1].lastChild.textContent.trim() : "has ended";
      const where = event ? `line ${event[0]}: ` : "";
      return element("li", {}, chip(rank, tick.waits[rank]), ` ${where}`, element("code", { textContent: line }));
    });
    ranksAt.replaceChildren(...places);
    const [row] = code.querySelectorAll(".now");
    if (row) code.scrollTop = row.offsetTop - code.clientHeight / 2;
    says.textContent = explain(tick);
    says.classList.toggle("waiting", tick.waits.includes(true));
    const found = values(tick);
    const all = found.flatMap((rank) => Object.keys(rank.found));
    const isFirst = found.every((rank) => rank.found.attempt?.value === "0");
    const names = [...new Set(all)].filter((name) => name !== "attempt" || !isFirst);
    table.replaceChildren(
      element("tr", {}, element("td"), ...found.map((_, rank) => element("th", {}, chip(rank)))),
      ...names.map((name) => {
        const cells = found.map(({ found: { [name]: cell } }) =>
          element("td", { textContent: cell?.value ?? "", className: cell?.fresh ? "fresh" : "" }),
        );
        return element("tr", {}, element("th", { textContent: name, scope: "row" }), ...cells);
      }),
    );
    log.textContent = found.map((rank) => rank.printed).join("");
    history.replaceState(null, "", `?watch=${choice.value}&step=${now}${location.hash}`);
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  }

  function start() {
    play.textContent = "Pause";
    timer = setInterval(() => (Number(slider.value) < ticks.length - 1 ? step(1) : stop()), 350);
  }

  const step = (by) => show(Number(slider.value) + by);

  function open(number) {
    stop();
    recording = recordings[choice.value];
    ticks = order(recording);
    slider.max = ticks.length - 1;
    rows = recording.code.map((html) =>
      element("span", { className: "line" }, element("span", { className: "chips" }), element("span", { innerHTML: `${html}\n` })),
    );
    code.replaceChildren(...rows);
    show(number);
  }

  const controls = element("div", { className: "controls" }, choice, back, play, forward, jump, slider);
  const told = element("div", {}, says, ranksAt, log);
  player.append(controls, element("pre", { className: "highlight" }, code));
  player.append(element("div", { className: "panes" }, told, element("div", {}, table)));
  back.addEventListener("click", () => step(-1));
  forward.addEventListener("click", () => step(1));
  play.addEventListener("click", () => (timer ? stop() : start()));
  jump.addEventListener("click", () => {
    const next = ticks.findIndex((tick, number) => number > Number(slider.value) && tick.meet);
    show(next < 0 ? ticks.length - 1 : next);
  });
  slider.addEventListener("input", () => show(Number(slider.value)));
  choice.addEventListener("change", () => open(0));
  player.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by && event.target !== slider && event.target !== choice) step(by);
  });
  const asked = new URLSearchParams(location.search);
  if (asked.get("watch") in recordings) choice.value = asked.get("watch");
  choice.hidden = Object.keys(recordings).length === 1;
  player.hidden = false;
  open(Number(asked.get("step") ?? 0));
}
