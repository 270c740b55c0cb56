// Compares two files in the page, as `diff` does: docs/diff.md, which tools/pages/widgets.py fills.
(async () => {
  const CONTEXT = 3; // unchanged lines around a changed one
  const TAGS = { "+": "ins", "-": "del", " ": "span" };
  // The HTML of each line that there is, and of each file the numbers of its lines.
  const { lines, files } = await unpack(document.querySelector("[type='application/gzip']"));
  const page = document.getElementById("compare");
  const [from, to] = page.querySelectorAll("select");
  const caption = page.querySelector(".caption");
  const code = page.querySelector("code");

  // Returns each line with its sign; those without one are a longest common subsequence.
  function diff(a, b) {
    const row = b.length + 1;
    const common = new Uint16Array((a.length + 1) * row); // lines, from i in a and from j in b
    for (let i = a.length - 1; i >= 0; i--) {
      for (let j = b.length - 1; j >= 0; j--) {
        const here = i * row + j;
        common[here] =
          a[i] === b[j] ? common[here + row + 1] + 1 : Math.max(common[here + row], common[here + 1]);
      }
    }
    const result = [];
    let added = []; // after what is removed at the same place
    let [i, j] = [0, 0];
    while (i < a.length || j < b.length) {
      const here = i * row + j;
      if (i < a.length && a[i] === b[j]) {
        result.push(...added, [" ", a[i]]);
        added = [];
        i++;
        j++;
      } else if (j === b.length || (i < a.length && common[here + row] >= common[here + 1])) {
        result.push(["-", a[i++]]);
      } else {
        added.push(["+", b[j++]]);
      }
    }
    return [...result, ...added];
  }

  function show() {
    const [a, b] = [from.value, to.value];
    const rows = diff(files[a], files[b]);
    const shown = rows.map((_, k) =>
      rows.slice(Math.max(0, k - CONTEXT), k + CONTEXT + 1).some(([sign]) => sign !== " "),
    );
    code.replaceChildren();
    rows.forEach(([sign, line], k) => {
      if (shown[k]) {
        const element = document.createElement(TAGS[sign]);
        element.className = "line";
        element.innerHTML = `${lines[line]}\n`;
        code.append(element);
      } else if (shown[k - 1] && shown.includes(true, k)) {
        code.insertAdjacentHTML("beforeend", '<span class="gap">⋯</span>');
      }
    });
    const changed = [...code.querySelectorAll("ins, del")].filter((line) => line.textContent.trim());
    caption.textContent = `${a} → ${b}: ${changed.length} changed lines`;
    history.replaceState(null, "", `?a=${a}&b=${b}`);
  }

  const asked = new URLSearchParams(location.search);
  to.selectedIndex = 1;
  for (const [select, name] of [[from, "a"], [to, "b"]]) {
    if (asked.get(name) in files) select.value = asked.get(name);
    select.addEventListener("change", show);
  }
  page.hidden = false;
  show();
})();
