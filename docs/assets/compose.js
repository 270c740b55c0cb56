// Shows the script composed of two files: docs/compose.md, which tools/pages/widgets.py fills.
(async () => {
  const NAME = "my_training.py";
  const EXAMPLE = "preemptible.py,recipes/evaluate.py";
  // The HTML of each line that there is; of each pair the numbers of its script's lines and the
  // files that these come from, or the reason why there is no script.
  const data = document.querySelector("[type='application/gzip']");
  const { lines, files, sources, reasons } = await unpack(data);
  const page = document.getElementById("compose");
  const [first, others] = [page.querySelector("select"), page.querySelector("fieldset")];
  const [caption, code] = [page.querySelector(".caption"), page.querySelector("code")];
  const [copy, save] = page.querySelectorAll("button");
  const pairs = [...Object.keys(files), ...Object.keys(reasons)];
  const element = (tag, properties) => Object.assign(document.createElement(tag), properties);

  function show() {
    const chosen = others.querySelector(":checked");
    const pair = chosen?.dataset.pair;
    caption.textContent = pair ? `${NAME}: ${files[pair].length} lines` : "Choose a second file.";
    copy.disabled = save.disabled = !pair;
    const rows = (files[pair] ?? []).map((line, n) => {
      const row = element("span", { className: "line", innerHTML: `${lines[line]}\n` });
      if (sources[pair][n] !== " ") row.classList.add(`part-${sources[pair][n]}`);
      return row;
    });
    code.replaceChildren(...rows);
    const part = pair?.startsWith(first.value) ? 0 : 1;
    first.className = `part-${part}`;
    for (const label of others.children) {
      label.className = label.firstChild.checked ? `part-${1 - part}` : "";
    }
    history.replaceState(null, "", `?files=${[first.value, chosen?.value ?? ""]}`);
  }

  // Offers what goes with the first file; of those that do not, it says why.
  function offer(second) {
    const labels = [...first.options].flatMap(({ value }) => {
      const names = [`${first.value} + ${value}`, `${value} + ${first.value}`];
      const pair = pairs.find((name) => names.includes(name));
      if (!pair) return [];
      const disabled = pair in reasons;
      const checked = value === second && !disabled;
      const box = element("input", { type: "radio", name: "second", value, disabled, checked });
      box.dataset.pair = pair;
      const label = element("label", {});
      label.append(box, ` ${value} `, element("small", { textContent: reasons[pair] ?? "" }));
      return [label];
    });
    others.replaceChildren(...labels);
    show();
  }

  first.addEventListener("change", () => offer(others.querySelector(":checked")?.value));
  others.addEventListener("change", show);
  copy.addEventListener("click", () => navigator.clipboard.writeText(code.textContent));
  save.addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([code.textContent]));
    element("a", { href: url, download: NAME }).click();
  });
  page.hidden = false;
  const asked = new URLSearchParams(location.search).get("files") ?? EXAMPLE;
  const [a, b] = asked.split(",");
  first.value = a;
  if (!first.value) first.selectedIndex = 0;
  offer(b);
})();
