// Plays what all ranks of a training did, line by line: what tools/watch has recorded.
document.querySelectorAll(".watch").forEach(async (player) => {
  // The HTML of all lines; of each script, its lines' numbers, how its run ended, and of each attempt
  // the events of each rank: line, collective, changed values, and the ranks of the collective.
  const data = player.querySelector("script");
  const isPacked = data.type === "application/gzip"; // as in the pages of docs/
  const { lines, files: recordings } = isPacked ? await unpack(data) : JSON.parse(data.textContent);
  const folded = player.closest("details.watching");
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
  const position = element("output", {});
  const says = element("p", { className: "says", role: "status" });
  const code = element("code", {});
  const scrolled = element("pre", { className: "highlight", tabIndex: 0 }, code);
  const ranksAt = element("ul");
  const table = element("table", { className: "values", tabIndex: 0, ariaLabel: "Values" });
  const log = element("pre", { className: "log", tabIndex: 0 });
  let [recording, ticks, rows, timer] = [null, [], [], null];

  // In a tick each rank begins its next line, unless it is in a collective that another rank of its
  // group has not reached: then it waits. Where none can go on, one has failed, or the run hangs.
  function order({ attempts, end }) {
    const result = [];
    for (const [attempt, ranks] of attempts.entries()) {
      const at = ranks.map(() => 0);
      for (;;) {
        const events = at.map((position, rank) => ranks[rank][position]);
        if (events.every((event) => !event)) break;
        const waits = events.map((event) => Boolean(event?.[1]) && !meets(event, events));
        const starts = attempt > 0 && at.every((position) => position === 0);
        result.push({ ranks, events, at: [...at], waits, starts: starts ? attempt : 0 });
        const go = events.map((event, rank) => Boolean(event) && !waits[rank]);
        if (!go.includes(true)) {
          const failed = at.map((position, rank) => position + 1 < ranks[rank].length);
          result.at(-1).stuck = !failed.includes(true) && (end === "hangs" || !events.includes(undefined));
          if (!failed.includes(true)) break;
          // A rank that sends may go on for some lines, though nobody receives: there the run fails.
          const last = end === "fails" && attempt === attempts.length - 1;
          if (last && events.includes(undefined)) break;
          failed.forEach((moves, rank) => (go[rank] = moves));
        }
        go.forEach((moves, rank) => (at[rank] += moves ? 1 : 0));
      }
    }
    return result;
  }

  // Whether all ranks of a collective's group, which by default are all that there are, are in it.
  function meets([, collective, , group], events) {
    const same = (event) => event?.[1] === collective && String(event[3]) === String(group);
    return (group ?? [...events.keys()]).every((rank) => same(events[rank]));
  }

  const OF_A_STEP = ["loss", "own gradient", "gradient"]; // the next step has none at first

  // The values of each rank at a tick, which of them are new, and those of the step before.
  function values(tick) {
    return tick.ranks.map((events, rank) => {
      const found = {};
      let [printed, before] = ["", {}];
      events.slice(0, tick.at[rank] + 1).forEach(([, , changed], k) => {
        if (changed.step) {
          before = { ...found };
          for (const name of OF_A_STEP) delete found[name];
        }
        for (const [name, value] of Object.entries(changed)) {
          if (name === "log") printed += value;
          else found[name] = { value, fresh: k === tick.at[rank] };
        }
      });
      return { found, printed, before };
    });
  }

  const chip = (rank, waits) =>
    element("span", { className: `chip rank-${rank % 4}${waits ? " waiting" : ""}`, textContent: rank });

  const list = (ranks) => `Rank${ranks.length > 1 ? "s" : ""} ${ranks.join(", ")}`;
  const ENDS = {
    "": "The run has ended.",
    fails: "The run was stopped, or has failed.",
    limit: "The recording ends here.",
    waits: "The recording ends here.",
    hangs: "",
  };

  function explain(tick) {
    const { ranks, events, waits, stuck, starts } = tick;
    if (starts) return `Attempt ${starts} starts.`;
    const groups = {}; // the ranks that do the same together, or wait at the same place
    events.forEach((event, rank) => {
      if (!event?.[1]) return;
      const [line, collective, , group] = event;
      let does = `is in a collective: ${collective}.`;
      if (waits[rank]) does = `waits in line ${line}: ${collective}.`;
      else if (group?.length === 1) does = `${collective}.`; // it waits for nobody
      (groups[does + (waits[rank] ? "" : group)] ??= { does, of: [] }).of.push(rank);
    });
    const sentences = Object.values(groups).map(({ does, of }) => {
      const all = of.length === ranks.length && of.length > 1 && does.startsWith("is");
      const who = all ? "All ranks" : list(of);
      return `${who} ${of.length > 1 ? does.replace(/^waits/, "wait").replace(/^is/, "are") : does}`;
    });
    const ended = [...events.keys()].filter((rank) => !events[rank]);
    if (ended.length) sentences.push(`${list(ended)} ${ended.length > 1 ? "have" : "has"} ended.`);
    if (stuck && ended.length) sentences.push("The call that is waited for never comes.");
    else if (stuck) sentences.push("They do not match: each waits for a call that the other never makes.");
    if (tick === ticks.at(-1)) sentences.push(ENDS[recording.end]);
    const numbers = new Set(events.map((event) => event?.[0]));
    const apart = numbers.size > 1 ? "Each rank runs a line of its own." : "";
    const together = ranks.length > 1 ? "All ranks are" : "Rank 0 is";
    return sentences.join(" ").trim() || apart || `${together} at line ${[...numbers][0]}.`;
  }

  function show(number) {
    const now = Math.max(0, Math.min(ticks.length - 1, Number(number) || 0));
    const tick = ticks[now];
    const found = values(tick);
    slider.value = now;
    position.textContent = `${now} / ${ticks.length - 1}`;
    rows.forEach((row) => row.firstChild.replaceChildren());
    code.querySelectorAll(".now").forEach((row) => row.classList.remove("now"));
    const places = tick.at.map((position, rank) => {
      const event = tick.ranks[rank][position];
      if (event) {
        rows[event[0] - 1].firstChild.append(chip(rank, tick.waits[rank]));
        rows[event[0] - 1].classList.add("now");
      }
      const line = event ? rows[event[0] - 1].lastChild.textContent.trim() : "has ended";
      const step = found[rank].found.step ? `step ${found[rank].found.step.value}, ` : "";
      const where = event ? `${step}line ${event[0]}: ` : "";
      return element("li", {}, chip(rank, tick.waits[rank]), ` ${where}`, element("code", { textContent: line }));
    });
    ranksAt.replaceChildren(...places);
    const [row] = code.querySelectorAll(".now");
    if (row) scrolled.scrollTop = row.offsetTop - scrolled.clientHeight / 2;
    says.textContent = explain(tick);
    says.classList.toggle("waiting", tick.waits.includes(true));
    const all = found.flatMap((rank) => Object.keys({ ...rank.before, ...rank.found }));
    const isFirst = found.every((rank) => rank.found.attempt?.value === "0");
    const names = [...new Set(all)].filter((name) => name !== "attempt" || !isFirst);
    table.replaceChildren(
      element("tr", {}, element("td"), ...found.map((_, rank) => element("th", {}, chip(rank)))),
      ...names.map((name) => {
        const cells = found.map(({ found: { [name]: cell }, before: { [name]: old } }) => {
          const past = old && old.value !== cell?.value && name !== "step" ? ` ←\u00a0${old.value}` : "";
          const shown = [cell?.value ?? "", element("span", { className: "before", textContent: past })];
          return element("td", { className: cell?.fresh ? "fresh" : "" }, ...shown);
        });
        return element("tr", {}, element("th", { textContent: name, scope: "row" }), ...cells);
      }),
    );
    log.textContent = found.map((rank) => rank.printed).join("");
    if (!folded) history.replaceState(null, "", `?watch=${choice.value}&step=${now}${location.hash}`);
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
    rows = recording.code.map((line, n) =>
      element(
        "span",
        { className: "line" },
        element("span", { className: "chips" }),
        element("span", { className: "number", textContent: n + 1 }),
        element("span", { innerHTML: `${lines[line]}\n` }),
      ),
    );
    code.replaceChildren(...rows);
    show(number);
  }

  const controls = element("div", { className: "controls" }, choice, back, play, forward, jump, slider, position);
  const told = element("div", {}, says, ranksAt, log);
  player.append(controls, scrolled);
  player.append(element("div", { className: "panes" }, told, element("div", {}, table)));
  back.addEventListener("click", () => step(-1));
  forward.addEventListener("click", () => step(1));
  play.addEventListener("click", () => (timer ? stop() : start()));
  jump.addEventListener("click", () => {
    // Where those of a group meet, or where one begins to wait.
    const met = (tick) => tick.events.some((event, rank) => event?.[1] && !tick.waits[rank]);
    const begins = (tick, before) => tick.waits.some((waits, rank) => waits && !before?.waits[rank]);
    const next = ticks.findIndex(
      (tick, n) => n > Number(slider.value) && (met(tick) || begins(tick, ticks[n - 1])),
    );
    show(next < 0 ? ticks.length - 1 : next);
  });
  slider.addEventListener("input", () => show(Number(slider.value)));
  choice.addEventListener("change", () => {
    choice.blur();
    open(0);
  });
  document.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const mine = player.contains(event.target) || (!folded && event.target === document.body);
    if (by && mine && !event.target.closest("input, select")) step(by);
  });
  choice.hidden = Object.keys(recordings).length === 1;
  player.hidden = false;
  const last = () => (recordings[choice.value].end === "hangs" ? Infinity : 0);
  if (folded) {
    // In a page of its own: it is made when it is unfolded, and begins where the page asks it to.
    folded.hidden = false;
    folded.addEventListener("toggle", () => {
      if (ticks.length) return;
      open(0);
      const text = (tick) => explain(tick) + tick.events.map((event) => rows[event?.[0] - 1]?.textContent);
      show(ticks.findIndex((tick) => text(tick).includes(player.dataset.at)));
    });
    return;
  }
  const asked = new URLSearchParams(location.search);
  const several = Object.keys(recordings).find((name) => recordings[name].attempts[0].length > 1);
  if (asked.get("watch") in recordings) choice.value = asked.get("watch");
  else if (several) choice.value = several; // the first with ranks to compare
  open(asked.get("step") ?? last());
});
