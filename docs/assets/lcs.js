// What diff.js and compose.js both need, and tools/compose/merge.py has, too.

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
