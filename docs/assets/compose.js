// Composes a script in the page, as tools/compose does: docs/compose.md, which widgets.py fills.
(() => {
  const NAME = "my_training.py";
  const EXAMPLE = "preemptible.py,recipes/evaluate.py";
  // The HTML of each line that there is; of each file, the numbers of its lines, how many of them
  // are its docstring, and what it builds on; and what the files in tools/compose/ say.
  const data = JSON.parse(document.getElementById("files").textContent);
  const { lines, files, docs, bases, pairs, resolutions } = data;
  const page = document.getElementById("compose");
  const [series, boxes] = [page.querySelector("select"), page.querySelector("fieldset")];
  const [caption, code] = [page.querySelector(".caption"), page.querySelector("code")];
  const [copy, save] = page.querySelectorAll("button");
  const order = Object.keys(files);
  const choices = order.filter((file) => Object.keys(pairs).join(" ").split(" ").includes(file));

  const element = (tag, properties) => Object.assign(document.createElement(tag), properties);
  const escape = (text) => element("p", { textContent: text }).innerHTML;
  const texts = lines.map((html) => element("p", { innerHTML: html }).textContent);
  const ancestors = (file) => (file ? [file, ...ancestors(bases[file])] : []);
  const isGpt = (file) => ancestors(file).includes("gpt/gpt.py");

  // From here to `fold`, the functions of tools/compose/merge.py. A line has its text and its part.
  const subject = (line) => line.text.match(/^\s*[\w.]*/)[0];

  function edits(old, new_) {
    const [added, replaced] = [{}, {}];
    let [i, j, removed, inserted] = [0, 0, [], []];
    const signs = diff(old.map((line) => line.text), new_.map((line) => line.text));
    for (const [sign] of [...signs, [" "]]) {
      if (sign === "-") removed.push(old[i++]);
      else if (sign === "+") inserted.push(new_[j++]);
      else {
        const start = i - removed.length;
        if (!removed.length) added[i] = inserted;
        else if (String(removed.map(subject)) === String(inserted.map(subject))) {
          inserted.forEach((line, n) => (replaced[start + n] = [start + n + 1, [line]]));
        } else replaced[start] = [i, inserted];
        [i, j, removed, inserted] = [i + 1, j + 1, [], []];
      }
    }
    return [added, replaced];
  }

  function version(old, start, end, added, replaced) {
    const result = [];
    for (let i = start, lines; i < end; ) {
      if (i > start) result.push(...(added[i] ?? []));
      [i, lines] = replaced[i] ?? [i + 1, old.slice(i, i + 1)];
      result.push(...lines);
    }
    return result;
  }

  const equal = (a, b) => a.length === b.length && a.every((line, n) => line.text === b[n].text);

  function joinImports(all) {
    const imports = {};
    for (const { text, part } of all) {
      const found = text.match(/^(import|from) (\S+)(?: import (\w.*))?$/);
      if (!found) return [];
      const key = `${found[1] === "from" ? 1 : 0} ${found[2]}`; // in their order
      const names = [...(imports[key]?.names ?? []), ...(found[3]?.split(", ") ?? [])];
      imports[key] = { names: new Set(names), part };
    }
    return Object.keys(imports).sort().map((key) => {
      const names = [...imports[key].names].sort().join(", ");
      const text = names ? `from ${key.slice(2)} import ${names}` : `import ${key.slice(2)}`;
      return { text, part: imports[key].part };
    });
  }

  function indents(all) {
    const found = all.map((line) => line.text.search(/\S/)).filter((indent) => indent >= 0);
    return found.length ? found : [0];
  }

  function settle(old, ours, theirs) {
    if (equal(theirs, old) || equal(theirs, ours)) return ours;
    if (equal(ours, old)) return theirs;
    const imports = joinImports([...ours, ...theirs]);
    const one = [ours, theirs, imports].every((side) => side.length === 1);
    if (imports.length && (!old.length || one)) return imports;
    const fits = ([a, b]) => !old.length && Math.min(...indents(a)) >= indents(b)[0];
    return [[ours, theirs], [theirs, ours]].find(fits)?.flat();
  }

  function merge(old, ours, theirs, resolve) {
    const [added, replaced] = edits(old, ours);
    const [theirAdded, theirReplaced] = edits(old, theirs);
    const result = [];
    let conflict = [[], []];
    const resolveConflict = () => {
      if (conflict.flat().length) result.push(...resolve(...conflict));
      conflict = [[], []];
    };
    let depth = Infinity; // at most, of what is added next
    const add = (before, a, b) => {
      let all = settle(before, a, b);
      if (all?.length && !before.length && indents(all)[0] > depth) all = undefined;
      if (!all) [a, b].forEach((side, n) => conflict[n].push(...side));
      if (all?.length) resolveConflict();
      result.push(...(all ?? []));
      const moved = all?.length && before.length && indents(before).at(-1) !== indents(all).at(-1);
      depth = moved ? indents(all).at(-1) : Infinity;
    };
    for (let start = 0, end; start <= old.length; start = end) {
      end = start + 1;
      for (let i = start; i < end; i++) {
        end = Math.max(end, replaced[i]?.[0] ?? 0, theirReplaced[i]?.[0] ?? 0);
      }
      add([], added[start] ?? [], theirAdded[start] ?? []);
      const a = version(old, start, end, added, replaced);
      const b = version(old, start, end, theirAdded, theirReplaced);
      add(old.slice(start, end), a, b);
    }
    resolveConflict();
    return result;
  }

  function fold(parts, linesOf, resolve) {
    let result = linesOf(parts[0]);
    const known = ancestors(parts[0]);
    for (const part of parts.slice(1)) {
      const base = ancestors(part).find((file) => known.includes(file));
      const old = linesOf(base).map(({ text }) => ({ text }));
      result = merge(old, result, linesOf(part), (ours, theirs) => resolve(part, ours, theirs));
      known.push(...ancestors(part));
    }
    return result;
  }

  // These are of tools/compose/resolutions.py.
  function withSources(all, part, ...sides) {
    const sources = Object.fromEntries(sides.flat().map((line) => [line.text, line.part]));
    return all.map((text) => ({ text, part: sources[text] ?? part }));
  }

  function find(part, ours, theirs) {
    const are = (side, all) => String(side.map((line) => line.text)) === String(all);
    const known = resolutions.find((one) => one.theirs &&
      ((are(ours, one.ours) && are(theirs, one.theirs)) ||
        (are(ours, one.theirs) && are(theirs, one.ours))));
    return known && withSources(known.lines, part, ours, theirs);
  }

  function replace(names, all) {
    for (const { parts, ours, theirs, lines } of resolutions) {
      if (theirs || !parts.every((part) => names.includes(part))) continue;
      const fits = (_, n) => ours.every((text, i) => text === all[n + i]?.text);
      const start = all.findIndex(fits);
      if (start < 0) continue;
      const old = all.slice(start, start + ours.length);
      all = all.toSpliced(start, ours.length, ...withSources(lines, parts.at(-1), old));
    }
    return all;
  }

  // As in tools/compose/compose.py: parts come after what they build on, if that has resolutions.
  function mergeOrder(parts) {
    const all = parts.flatMap(ancestors);
    const inAll = ({ parts }) => parts.every((part) => all.includes(part));
    const met = resolutions.filter(inAll).flatMap((known) => known.parts);
    const bases = parts.flatMap((part) => ancestors(part).slice(1));
    const more = bases.filter((file) => met.includes(file));
    const depth = (file) => ancestors(file).slice(1).filter((base) => more.includes(base)).length;
    return [...new Set([...more, ...parts])].sort((a, b) => depth(a) - depth(b));
  }

  // Returns the lines of the script, or null if the parts conflict.
  function compose(parts) {
    let fits = true;
    const more = {}; // what a part adds to the command in its docstring
    const linesOf = (file) => files[file].map((n) => ({ text: texts[n], part: file }));
    const codeOf = (file) => linesOf(file).slice(docs[file]);
    const docOf = (file) =>
      linesOf(file).slice(0, docs[file]).map((line) => {
        const [before, after] = line.text.split(`${file} 50 10`);
        if (after) more[file] = { text: `        ${after.trim()}`, part: file };
        return after === undefined ? line : { ...line, text: `${before}${NAME} 50 10` };
      });
    const stages = (part) => ancestors(part).filter((file) => !file.includes("/")).length;
    const lead = parts.reduce((a, b) => (stages(b) > stages(a) ? b : a));
    const leadFirst = [lead, ...parts.filter((part) => part !== lead)];
    const doc = fold(leadFirst, docOf, (part, ours) => ours);
    const resolve = (part, ours, theirs) => find(part, ours, theirs) ?? ((fits = false), ours);
    const code = replace(parts.flatMap(ancestors), fold(mergeOrder(leadFirst), codeOf, resolve));
    const end = doc.pop();
    const command = (line) => {
      const all = [line, ...parts.flatMap((part) => more[part] ?? [])];
      return all.map((l, n) => (n < all.length - 1 ? { ...l, text: `${l.text} \\` } : l));
    };
    const start = doc.flatMap((line) => (line.text.endsWith(" 50 10") ? command(line) : [line]));
    const list = parts.map((part) => ({ text: `    ${part}`, part }));
    return fits ? [...start, { text: "Composed of:" }, ...list, end, ...code] : null;
  }

  // Returns why a file cannot be added to another, or "".
  function reason(file, other) {
    if (ancestors(file).includes(other)) return `builds on ${other}`;
    if (ancestors(other).includes(file)) return `is in ${other}`;
    const known = pairs[order.filter((name) => [file, other].includes(name)).join(" + ")];
    return { proven: "", conflict: `changes the same lines as ${other}` }[known] ?? known;
  }

  function show() {
    const ticked = [...boxes.querySelectorAll(":checked")].map((box) => box.value);
    for (const label of boxes.querySelectorAll("label")) {
      const box = label.firstChild;
      const others = ticked.filter((part) => part !== box.value);
      const why = others.map((part) => reason(box.value, part)).find((text) => text) ?? "";
      box.disabled = why !== "" && !box.checked;
      label.className = box.checked ? `part-${ticked.indexOf(box.value) % 6}` : "";
      label.lastChild.textContent = why;
    }
    const script = ticked.length > 1 ? compose(ticked) : [];
    const hint = ticked.length > 1 ? "These change the same lines." : "Tick two files or more.";
    caption.textContent = script?.length ? `${NAME}: ${script.length} lines` : hint;
    copy.disabled = save.disabled = !script?.length;
    const contains = (part) => (file) => ancestors(file).includes(part);
    const rows = (script ?? []).map(({ text, part }) => {
      const html = lines[texts.indexOf(text)] ?? escape(text);
      const row = element("span", { className: "line", innerHTML: `${html}\n` });
      if (part) row.classList.add(`part-${ticked.findIndex(contains(part)) % 6}`);
      row.style.setProperty("--indent", `${text.search(/\S|$/)}ch`);
      return row;
    });
    code.replaceChildren(...rows);
    history.replaceState(null, "", `?files=${ticked}`);
  }

  // Offers the files of a series, with some of them ticked.
  function offer(parts) {
    const gpt = series.value === "gpt";
    const labels = choices.filter((file) => isGpt(file) === gpt).map((file) => {
      const label = element("label", {});
      const box = element("input", { type: "checkbox", value: file, checked: parts.includes(file) });
      label.append(box, ` ${file} `, element("small", {}));
      return label;
    });
    boxes.replaceChildren(...labels);
    show();
  }

  series.addEventListener("change", () => offer([]));
  boxes.addEventListener("change", show);
  copy.addEventListener("click", () => navigator.clipboard.writeText(code.textContent));
  save.addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([code.textContent]));
    element("a", { href: url, download: NAME }).click();
  });
  page.hidden = false;
  const asked = new URLSearchParams(location.search).get("files") ?? EXAMPLE;
  series.value = asked.split(",").some(isGpt) ? "gpt" : "";
  offer(asked.split(","));
})();
