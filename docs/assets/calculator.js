// The calculator of docs/choose.md. Its fields take any numbers, so no table that
// Python writes has all answers: these are the formulas of tools/formulas, which explains them, with
// the constants that tools/pages/widgets.py brings from there. A test compares the results.
(() => {
  const page = document.getElementById("calculator");
  const { hardware, ...C } = JSON.parse(page.querySelector("script").textContent);
  const form = page.querySelector("form");
  const status = page.querySelector("[role=status]");
  const [ways, parts] = page.querySelectorAll("table");
  const fields = [...form.elements].filter((field) => field.name);
  const sliders = [...form.querySelectorAll("[type=range]")]; // of the binary logarithm
  const GB = 1e9;

  // tools/formulas/memory.py
  function activations(model, samples, inputBytes, recompute, tp) {
    const channels = samples * model.context * model.nEmbd;
    const kept = model.block;
    const split = C.NORM_INPUTS * inputBytes + kept.others * C.BFLOAT16;
    const block = channels * (split / tp + kept.matrix_inputs * C.BFLOAT16);
    const backward = (channels * kept.backward * C.BFLOAT16) / tp;
    if (!recompute) return [model.nLayer * block, backward];
    return [(model.nLayer * channels * inputBytes) / tp, block + backward];
  }

  function gathered(model, tp) {
    const block = model.blockParams / tp;
    const embedding = model.embeddingParams / tp;
    const head = model.headParams / tp;
    const atStart = (embedding + head) * C.BFLOAT16;
    let inUse = 3 * block * C.BFLOAT16;
    if (tp > 1) {
      inUse += block * C.FLOAT32 + head * C.BFLOAT16;
      const atEnd = atStart + (embedding + head) * C.FLOAT32;
      return [atStart, Math.max(atStart + inUse, atEnd), atEnd];
    }
    const during = embedding * C.BFLOAT16 + inUse + Math.max(block, head) * C.FLOAT32;
    return [atStart, during, embedding * (C.BFLOAT16 + C.FLOAT32)];
  }

  function memory(model, samples, { shards, recompute, tp }, compiled, chunks) {
    const weights = (C.FLOAT32 * model.params) / shards;
    let copies, atStart, during, atEnd;
    if (shards === 1) {
      copies = C.BFLOAT16 * model.params;
      atStart = during = copies + weights;
      atEnd = 0;
    } else {
      [atStart, during, atEnd] = gathered(model, tp);
      copies = Math.max(during, atEnd);
    }
    const inputBytes = shards === 1 ? C.FLOAT32 : C.BFLOAT16;
    const [kept, backward] = activations(model, samples, inputBytes, recompute, tp);
    const logitBytes = compiled ? C.COMPILED_LOGITS * C.BFLOAT16 : C.LOGITS * C.FLOAT32;
    const ofHead = chunks > 1 ? C.CHUNKED_HEAD * model.headParams * C.BFLOAT16 : 0;
    const logits = (samples * model.context * model.vocabSize * logitBytes) / chunks + ofHead;
    const most = Math.max(kept + logits + atStart, kept + backward + during, weights + atEnd);
    return {
      weights,
      optimizer: 2 * weights,
      gradients: weights,
      copies,
      activations: kept + backward,
      logits,
      peak: 3 * weights + most,
    };
  }

  // tools/formulas/scaling.py
  function ring(gpu, gpus, size, blocks) {
    const nodes = Math.ceil(gpus / gpu.gpus_per_node);
    const latency = (gpus - nodes) * gpu.nvlink_latency + (nodes - 1) * gpu.network_latency;
    let bandwidth = gpu.nvlink_bandwidth;
    if (nodes > 1) bandwidth = Math.min(bandwidth, gpu.network_bandwidth);
    return blocks * latency + (((gpus - 1) / gpus) * size) / bandwidth;
  }

  function stepTime(gpu, gpus, params, flops, shards, recompute, blocks) {
    const utilization = recompute ? gpu.recompute_utilization : gpu.utilization;
    const forward = flops / 3 / gpus / (gpu.flops * utilization);
    const gather = ring(gpu, shards, C.WEIGHT_BYTES * params, blocks);
    const reduceScatter = ring(gpu, shards, C.GRADIENT_BYTES * params, blocks);
    const replicas = Math.floor(gpus / shards);
    const ofNode = gpus <= gpu.gpus_per_node ? gpu.nvlink_bandwidth : gpu.network_bandwidth;
    const bandwidth = ofNode / Math.min(shards, gpu.gpus_per_node);
    const hops = 2 * Math.ceil(Math.log2(replicas));
    const size = (C.GRADIENT_BYTES * params) / shards;
    const ringTime = (((2 * (replicas - 1)) / replicas) * size) / bandwidth;
    const allReduce = blocks * hops * gpu.tree_latency + ringTime;
    const backward = (recompute ? 3 : 2) * forward;
    return Math.max(forward, gather) + Math.max(backward, gather + reduceScatter, allReduce);
  }

  // tools/formulas/calculator.py
  function gptOfSize(params, context, vocabSize, block) {
    let nEmbd;
    for (let width = C.CHANNELS_PER_LAYER; nEmbd === undefined; width += C.CHANNELS_PER_LAYER) {
      const wider = width + C.CHANNELS_PER_LAYER;
      const blocks = (12 * wider ** 3) / C.CHANNELS_PER_LAYER;
      if (blocks + (2 * vocabSize + context) * wider > params) nEmbd = width;
    }
    const headParams = vocabSize * nEmbd;
    const inBlocksOfGPT = params - context * nEmbd - 2 * headParams;
    const nLayer = Math.max(1, Number(round(inBlocksOfGPT / (12 * nEmbd ** 2), 0)));
    const embeddingParams = (vocabSize + context * block.positions) * nEmbd;
    const inBlocks = params - embeddingParams - headParams;
    const attention = 12 * nLayer * nEmbd * context;
    const flopsPerToken = 6 * (params - embeddingParams) + attention;
    const shape = { params, context, vocabSize, nEmbd, nLayer, block };
    return { ...shape, embeddingParams, headParams, blockParams: inBlocks / nLayer, flopsPerToken };
  }

  function waysToTrain(gpus) {
    const node = hardware.gpus_per_node;
    let tp = node;
    while (gpus % tp || node % tp) tp--;
    const all = [["DDP", 1, false, 1], ["DDP, recompute", 1, true, 1]];
    if (gpus > 1) all.push(["FSDP", gpus, false, 1], ["FSDP, recompute", gpus, true, 1]);
    if (gpus > node && gpus % node === 0) all.push(["HSDP, recompute", node, true, 1]);
    if (tp > 1) all.push([`FSDP, recompute, TP ${tp}`, gpus, true, tp]);
    return all.map(([name, shards, recompute, tp]) => ({ name, shards, recompute, tp }));
  }

  function tokensPerSecond(model, gpus, samples, { shards, recompute, tp }) {
    const group = {
      ...hardware,
      flops: hardware.flops * tp,
      gpus_per_node: Math.floor(hardware.gpus_per_node / tp),
      nvlink_bandwidth: hardware.nvlink_bandwidth * tp,
    };
    const groups = Math.floor(gpus / tp);
    const tokens = samples * model.context * groups;
    const flops = model.flopsPerToken * tokens;
    const step = [model.params, flops, Math.min(shards, groups), recompute, model.nLayer + 1];
    const size = C.TP_BYTES * samples * model.context * model.nEmbd;
    const hop = hardware.nvlink_latency + size / tp / hardware.nvlink_bandwidth;
    const waiting = (recompute ? 12 : 8) * model.nLayer * (tp - 1) * hop;
    return tokens / (stepTime(group, groups, ...step) + waiting);
  }

  // As Python's format() does: of two nearest numbers, the even one, and commas.
  function round(number, digits) {
    const scaled = number * 10 ** digits;
    const tie = scaled % 1 === 0.5 && Number.isInteger(number * 2 ** (digits + 1));
    const rounded = tie ? (2 * Math.round(scaled / 2)) / 10 ** digits : number;
    return rounded.toFixed(digits);
  }
  const withCommas = (text) => text.replace(/\B(?=(\d{3})+(?!\d))/g, ",");
  function twoDigits(number) {
    const rounded = Number(number.toPrecision(2));
    return withCommas(rounded < 100 ? rounded.toPrecision(2) : `${rounded}`);
  }

  function addRow(table, heading, cells) {
    const row = table.tBodies[0].insertRow();
    row.innerHTML = `<th scope="row">${heading}</th>`;
    for (const cell of cells) row.insertCell().append(cell);
    return row;
  }

  function show() {
    for (const table of [ways, parts]) table.tBodies[0].replaceChildren();
    for (const slider of sliders) {
      slider.value = Math.log2(slider.previousElementSibling.control.value);
    }
    const wrong = fields.find((field) => !field.validity.valid);
    if (wrong) {
      status.textContent = `${wrong.labels[0].textContent.trim()}: ${wrong.validationMessage}`;
      return;
    }
    const values = Object.fromEntries(fields.map(({ name, value }) => [name, Number(value)]));
    const { params, gpus, context, gpu_memory, batch_size, loss_chunks: chunks } = values;
    const { tokens, price } = values;
    const block = C.BLOCK_TYPES[form.elements.llama.checked ? "llama" : "gpt"];
    const model = gptOfSize(params * GB, context, C.VOCAB_SIZE, block);
    if (model.blockParams <= 0) {
      status.textContent = "The embedding and the head alone have more parameters.";
      return;
    }
    status.textContent = `${model.nLayer} blocks of ${withCommas(`${model.nEmbd}`)} channels`;
    for (const way of waysToTrain(gpus)) {
      if (way.recompute && !form.elements.recompute.checked) continue;
      const { compile } = form.elements;
      const bytes = memory(model, batch_size, way, compile.checked, chunks);
      const fits = bytes.peak <= C.USABLE_MEMORY * gpu_memory * GB;
      const bar = `<span class="bar" style="--used: ${bytes.peak / gpu_memory / 1e7}%"></span>`;
      const speed = tokensPerSecond(model, gpus, batch_size, way);
      const hours = (tokens * GB) / speed / 3600;
      const numbers = [speed, hours, gpus * hours, gpus * hours * price];
      const results = numbers.map((number) => (fits ? twoDigits(number) : "–"));
      const cells = [round(bytes.peak / GB, 1), fits ? "yes" : "no", ...results];
      addRow(ways, way.name + bar, cells).className = fits ? "fits" : "";
      addRow(parts, way.name, Object.values(bytes).map((part) => round(part / GB, 1)));
    }
  }

  const asked = new URLSearchParams(location.search);
  for (const field of asked.has("params") ? fields : []) {
    field.checked = asked.get(field.name) === "yes";
    if (field.type === "number" && asked.has(field.name)) field.value = asked.get(field.name);
  }
  form.addEventListener("input", ({ target }) => {
    if (sliders.includes(target)) {
      const number = target.previousElementSibling.control;
      number.value = Number((2 ** target.value).toPrecision(number.step === "any" ? 2 : 6));
    }
    const state = fields.filter(({ type, checked }) => type === "number" || checked);
    const query = state.map(({ name, type, value }) => [name, type === "number" ? value : "yes"]);
    history.replaceState(null, "", `?${new URLSearchParams(query)}${location.hash}`);
    show();
  });
  page.hidden = false;
  show();
})();
