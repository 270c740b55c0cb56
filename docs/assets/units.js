// Below a changed line that one touches, says what falls without it, and which test notices.
(() => {
  const units = JSON.parse(document.getElementById("units").textContent);
  const lines = [...document.querySelectorAll(".diff [data-unit]")];
  const note = document.createElement("span");
  note.className = "without";
  note.setAttribute("role", "status");
  let open = null; // the line whose note is shown

  // A tab stop at the first of the neighbours that are one unit, for the keyboard.
  const isFirst = (line) => line.previousElementSibling?.dataset.unit !== line.dataset.unit;

  function neighbours(line) {
    while (!isFirst(line)) line = line.previousElementSibling;
    const found = [line];
    while (found.at(-1).nextElementSibling?.dataset.unit === line.dataset.unit) {
      found.push(found.at(-1).nextElementSibling);
    }
    return found;
  }

  function close() {
    for (const line of lines) line.classList.remove("marked");
    open?.setAttribute("aria-expanded", "false");
    open = null;
    note.remove();
  }

  function show(line) {
    const own = neighbours(line);
    const again = open === own[0];
    close();
    if (again) return;
    open = own[0];
    open.setAttribute("aria-expanded", "true");
    const [file, number] = line.dataset.unit.split(":");
    const { without, fails } = units[file][number];
    for (const other of lines) {
      other.classList.toggle("marked", other.dataset.unit === line.dataset.unit);
    }
    note.textContent = `Without it: ${without}`;
    if (fails) {
      const name = document.createElement("code");
      name.textContent = fails;
      note.append(" What fails: ", name);
    }
    own.at(-1).after(note);
  }

  for (const line of lines) {
    line.addEventListener("click", () => getSelection().isCollapsed && show(line));
    if (isFirst(line)) {
      line.tabIndex = 0;
      line.setAttribute("role", "button");
      line.setAttribute("aria-expanded", "false");
      line.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          show(line);
        }
      });
    }
  }
  const hint = document.createElement("small");
  hint.textContent = "touch a changed line: what falls without it?";
  const shown = lines.find((line) => !line.closest("details")); // imports stand folded
  shown?.closest(".diff").querySelector(".caption").append(hint);
  document.addEventListener("keydown", (event) => event.key === "Escape" && close());
})();
