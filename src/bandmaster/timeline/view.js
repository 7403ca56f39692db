"use strict";
(async () => {
  const $ = (id) => document.getElementById(id);
  const head = JSON.parse($("head").textContent);
  const packed = Uint8Array.from(atob($("body").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const types = { Float64Array, Float32Array, Uint32Array };
  const data = {};
  for (const [name, [type, offset, length]] of Object.entries(head.columns))
    data[name] = new types[type](buffer, offset, length);
  const { begun, call, queued, decoded, ran, encoded, moved, row_starts: rowStarts } = data;

  const COLOURS = ["#3b78d8", "#e0752d", "#2f9e6e", "#a45bd1", "#c2477f", "#2a9fb5", "#7a8b2f", "#8d6e63", "#5f62c8",
    "#b0566a", "#4d8a5b", "#a06a1f"];
  const colourOf = (method) => COLOURS[method % COLOURS.length];
  const names = head.methods.map(([, method]) => method.split(".").pop());
  const isHidden = new Uint8Array(head.methods.length); // by method

  const plot = $("plot"), canvas = plot.querySelector("canvas"), tip = $("tip"), paint = canvas.getContext("2d");
  const AXIS = 22, BAND = 20, STRIP = 5, GAP = 3, ROW = 17, MOST = 108, LEAST = 3;
  const span = Math.max(1e-6, head.end - head.begin);
  const view = { from: head.begin - 0.01 * span, to: head.end + 0.01 * span };
  const all = { ...view };
  const colours = {};
  let lanes = [], bands = [], width = 0, height = 0, gutter = 0, hovered = null;

  function time(seconds) {
    const size = Math.abs(seconds);
    if (size >= 100) return `${seconds.toFixed(0)} s`;
    if (size >= 1) return `${+seconds.toPrecision(4)} s`;
    if (size >= 1e-3) return `${+(1e3 * seconds).toPrecision(3)} ms`;
    return `${+(1e6 * seconds).toPrecision(3)} µs`;
  }
  function bytes(n) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let unit = 0;
    while (n >= 1000 && unit < 4) { n /= 1000; unit += 1; }
    return `${+n.toPrecision(3)} ${units[unit]}`;
  }

  // --- what is where ---

  function layOut() {
    let y = AXIS, row = 0, group = null;
    lanes = []; bands = [];
    for (const lane of head.lanes) {
      if (lane.group !== group) {
        group = lane.group;
        bands.push({ group, y, n: head.lanes.filter((other) => other.group === group).length, own: lane.rank < 0 });
        y += BAND;
      }
      const shown = Math.max(1, Math.min(lane.rows, MOST / LEAST));
      const rowHeight = Math.max(LEAST, Math.min(ROW, MOST / shown));
      lanes.push({ ...lane, y, first: row, shown, rowHeight, body: y + STRIP, height: STRIP + shown * rowHeight + GAP });
      row += lane.rows;
      y += lanes[lanes.length - 1].height;
    }
    height = y + 6;
  }
  const rowAt = (lane, n) => lane.rows > lane.shown ? Math.floor(n * lane.shown / lane.rows) : n;
  const endOf = (n) => begun[n] + decoded[n] + ran[n] + encoded[n];

  /** The first item of a row that ends after a moment: items of a row do not overlap. */
  function firstAfter(row, moment) {
    let low = rowStarts[row], high = rowStarts[row + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (endOf(middle) < moment) low = middle + 1; else high = middle;
    }
    return low;
  }

  // --- drawing ---

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["back", "text", "soft", "line", "band", "wait", "move", "stall", "version", "mark"])
      colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
  const scale = () => (width - gutter) / (view.to - view.from);
  const xOf = (moment) => gutter + (moment - view.from) * scale();

  // Items are written into an array of pixels, which is several times as fast as drawing 100,000 rectangles.
  let image = null, pixels = null, across = 0, down = 0, ratio = 1, top = 0, shown = 0;

  const LEVELS = 8; // strengths of the colour of a pixel whose items cover only a part of it
  const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const packedColour = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  const mixed = (colour, back, part) => packedColour(colour.map((c, n) => Math.round(part * c + (1 - part) * back[n])));
  let inks = [], ground = 0, bandInk = 0, lineInk = 0, moveInk = 0;
  function mix() {
    const back = rgb(colours.back);
    ground = packedColour(back);
    bandInk = packedColour(rgb(colours.band));
    lineInk = packedColour(rgb(colours.line));
    moveInk = packedColour(rgb(colours.move));
    inks = head.methods.map((_, method) =>
      Array.from({ length: LEVELS + 1 }, (_, n) => mixed(rgb(colourOf(method)), back, 0.3 + 0.7 * n / LEVELS)));
  }
  /** Fill a rectangle, in pixels of the device. */
  function block(from, to, y, end, ink) {
    from = Math.max(0, from);
    to = Math.min(across, to);
    y = Math.max(0, y);
    end = Math.min(down, end);
    if (to <= from) return;
    for (let at = y * across; y < end; y++, at += across) {
      if (to - from > 12) pixels.fill(ink, at + from, at + to);
      else for (let x = from; x < to; x++) pixels[at + x] = ink;
    }
  }

  /** Items narrower than a pixel are summed up per pixel: the longest gives the colour, the sum its strength. */
  function drawRow(lane, n, y, rowHeight) {
    const row = lane.first + n, end = rowStarts[row + 1], perSecond = scale() * ratio, edge = Math.round(gutter * ratio);
    const low = Math.round((y - top) * ratio), high = Math.round((y + rowHeight - top) * ratio) - (rowHeight > 4 ? 1 : 0);
    if (high <= 0 || low >= down) return;
    let pixel = -1, covered = 0, longest = 0, method = 0;
    const flush = () => {
      if (covered > 0)
        block(pixel, pixel + 1, low, high, inks[method][Math.min(LEVELS, Math.round(LEVELS * covered))]);
      covered = longest = 0;
    };
    for (let k = firstAfter(row, view.from); k < end && begun[k] < view.to; k++) {
      const own = head.method[call[k]];
      if (isHidden[own]) continue;
      const x = edge + (begun[k] - view.from) * perSecond, size = (decoded[k] + ran[k] + encoded[k]) * perSecond;
      if (size < 1.5) {
        const at = Math.max(edge, Math.floor(x));
        if (at !== pixel) { flush(); pixel = at; }
        covered += size;
        if (size >= longest) { longest = size; method = own; }
      } else {
        flush();
        drawItem(k, own, x, size, perSecond, edge, low, high);
      }
    }
    flush();
  }
  const labels = [];
  function drawItem(k, method, x, size, perSecond, edge, low, high) {
    const left = Math.max(edge, Math.round(x)), right = Math.min(across, Math.round(x + size));
    const end = right - (right - left > 3 ? 1 : 0); // a gap between neighbours
    block(left, end, low, high, inks[method][LEVELS]);
    const stripe = Math.max(1, Math.round(2 * ratio));
    const part = (from, to) => {
      const a = Math.max(edge, Math.round(from)), b = Math.min(end, Math.round(to));
      if (b - a >= 1) block(a, b, low, high - stripe, moveInk);
    };
    part(x, x + decoded[k] * perSecond);
    part(x + size - encoded[k] * perSecond, x + size);
    const wanted = (6.4 * names[method].length + 8) * ratio;
    if (high - low >= 11 * ratio && right - left > wanted) labels.push([names[method], left / ratio + 4, (low + high) / 2 / ratio]);
  }

  /** How many wait, from moments at which each begins and ends to wait, as a strip. */
  function drawWaiting(waits, y) {
    const n = width - gutter, change = new Int32Array(n + 2), perSecond = scale();
    let is = false;
    waits((from, to) => {
      if (to <= view.from || from >= view.to || (to - from) * perSecond < 0.3) return;
      const a = Math.max(0, Math.floor((from - view.from) * perSecond));
      change[a] += 1;
      change[Math.max(a + 1, Math.min(n + 1, Math.ceil((to - view.from) * perSecond)))] -= 1;
      is = true;
    });
    if (!is) return;
    paint.fillStyle = colours.wait;
    let depth = 0, since = 0;
    for (let x = 0; x <= n; x++) {
      if (change[x] === 0 && x < n) continue;
      if (depth > 0) {
        paint.globalAlpha = Math.min(1, 0.45 + 0.12 * depth);
        paint.fillRect(gutter + since, y, x - since, STRIP - 2);
      }
      depth += change[x];
      since = x;
    }
    paint.globalAlpha = 1;
  }
  const waitsOfLane = (lane) => (each) => {
    for (let k = rowStarts[lane.first]; k < rowStarts[lane.first + lane.rows]; k++)
      if (queued[k] > 0 && !isHidden[head.method[call[k]]]) each(begun[k] - queued[k], begun[k]);
  };
  const waitsOfGroup = (group) => (each) => {
    for (let n = 0; n < head.method.length; n++)
      if (head.request[n] && head.methods[head.method[n]][0] === group) each(data.call_encoded[n], data.call_sent[n]);
  };

  function steps() {
    const step = [1, 2, 5].flatMap((m) => Array.from({ length: 14 }, (_, n) => m * 10 ** (n - 8)))
      .filter((one) => one * scale() >= 74).sort((one, other) => one - other)[0];
    const found = [];
    for (let n = Math.ceil(view.from / step); n * step < view.to; n++)
      if (xOf(n * step) >= gutter) found.push(n * step);
    return found;
  }
  function drawAxis(moments) {
    paint.fillStyle = colours.back;
    paint.fillRect(0, 0, width, AXIS - 2);
    paint.fillStyle = colours.soft;
    paint.textAlign = "center";
    for (const moment of moments) {
      const x = xOf(moment);
      if (x > gutter + 12 && x < width - 22) paint.fillText(time(moment), x, AXIS / 2);
    }
    paint.textAlign = "left";
  }

  function drawStalls() {
    for (const stall of head.stalls) {
      const from = Math.max(gutter, xOf(stall.from)), to = Math.min(width, xOf(stall.to));
      if (to < gutter || from > width) continue;
      for (const n of stall.lanes) {
        const lane = lanes[n], guilty = stall.guilty.includes(n);
        paint.fillStyle = paint.strokeStyle = colours.stall;
        paint.globalAlpha = guilty ? 0.4 : 0.16;
        paint.fillRect(from, lane.y, to - from, lane.height - GAP);
        paint.globalAlpha = 1;
        if (guilty) paint.strokeRect(from + 0.5, lane.y + 0.5, Math.max(1, to - from - 1), lane.height - GAP - 1);
      }
    }
  }
  function drawVersions(lane) {
    let free = -1;
    for (const [moment, version] of lane.versions) {
      const x = Math.round(xOf(moment));
      if (x < gutter || x > width) continue;
      paint.fillStyle = colours.version;
      paint.fillRect(x, lane.y, 2, lane.height - GAP);
      const label = `v${version}`, size = 6.5 * label.length + 6;
      if (x < free || x + size > width || lane.height < STRIP + 14) continue;
      paint.fillRect(x, lane.y, size, 13);
      paint.fillStyle = colours.back;
      paint.fillText(label, x + 3, lane.y + 7);
      free = x + size;
    }
  }

  function draw() {
    top = Math.max(0, Math.min(-plot.getBoundingClientRect().top, height - shown));
    const isSeen = (one, size) => one.y + size > top && one.y < top + shown;
    const moments = steps(), seen = lanes.filter((lane) => isSeen(lane, lane.height));
    pixels.fill(ground);
    for (const band of bands)
      block(0, across, Math.round((band.y - top) * ratio), Math.round((band.y + BAND - 2 - top) * ratio), bandInk);
    for (const moment of moments) block(Math.round(xOf(moment) * ratio), Math.round(xOf(moment) * ratio) + 1, 0, down, lineInk);
    labels.length = 0;
    for (const lane of seen)
      for (let n = 0; n < lane.rows; n++)
        drawRow(lane, n, lane.body + rowAt(lane, n) * lane.rowHeight, lane.rowHeight);
    paint.putImageData(image, 0, 0);

    paint.font = "11px system-ui, sans-serif";
    paint.textBaseline = "middle";
    paint.fillStyle = "#fff";
    for (const [label, x, y] of labels) paint.fillText(label, x, y + 0.5);
    paint.save();
    paint.translate(0, -top);
    for (const band of bands) {
      if (!isSeen(band, BAND)) continue;
      paint.fillStyle = colours.text;
      paint.font = "600 11px system-ui, sans-serif";
      paint.fillText(band.group, 6, band.y + BAND / 2 - 1);
      const size = paint.measureText(band.group).width;
      paint.font = "11px system-ui, sans-serif";
      paint.fillStyle = colours.soft;
      const more = band.own ? "planning, sending, joining" : band.n === 1 ? "1 rank" : `${band.n} ranks`;
      paint.fillText(more, 6 + size + 8, band.y + BAND / 2 - 1);
      drawWaiting(waitsOfGroup(band.group), band.y + BAND - 5);
    }
    for (const lane of seen) {
      if (lane.rank >= 0) {
        paint.fillStyle = colours.soft;
        paint.fillText(gutter > 40 ? `rank ${lane.rank}` : lane.rank, 6, lane.body + (lane.height - STRIP - GAP) / 2);
      }
      drawWaiting(waitsOfLane(lane), lane.y + 1);
      drawVersions(lane);
    }
    drawStalls();
    drawHovered();
    paint.restore();
    drawAxis(moments);
  }

  function boxOf(k, lane) {
    for (let n = 0; n < lane.rows; n++) {
      if (k >= rowStarts[lane.first + n] && k < rowStarts[lane.first + n + 1]) {
        const x = Math.max(gutter, xOf(begun[k])), end = Math.min(width, xOf(endOf(k)));
        return { x, y: lane.body + rowAt(lane, n) * lane.rowHeight, w: Math.max(2, end - x), h: lane.rowHeight - 1 };
      }
    }
    return null;
  }
  const itemsOf = (n) => itemsByCall.get(n) || [];
  const itemsByCall = new Map();
  head.lanes.reduce((row, lane, n) => {
    if (lane.rank >= 0)
      for (let k = rowStarts[row]; k < rowStarts[row + lane.rows]; k++) {
        if (!itemsByCall.has(call[k])) itemsByCall.set(call[k], []);
        itemsByCall.get(call[k]).push([k, n]);
      }
    return row + lane.rows;
  }, 0);
  const sources = new Map();
  for (let n = 0; n < data.taken.length; n += 3) {
    if (!sources.has(data.taken[n])) sources.set(data.taken[n], []);
    sources.get(data.taken[n]).push([data.taken[n + 1], data.taken[n + 2]]);
  }

  function drawHovered() {
    if (hovered === null) return;
    paint.strokeStyle = colours.mark;
    paint.lineWidth = 1.5;
    const targets = [];
    for (const [k, n] of itemsOf(call[hovered])) {
      const box = boxOf(k, lanes[n]);
      if (box === null || box.x > width) continue;
      paint.strokeRect(box.x, box.y, box.w, box.h);
      targets.push(box);
    }
    paint.setLineDash([4, 3]);
    for (const [source, rank] of sources.get(call[hovered]) || []) {
      const found = itemsOf(source).find(([, n]) => lanes[n].rank === rank);
      const from = found && boxOf(found[0], lanes[found[1]]);
      if (!from) continue;
      for (const to of targets) {
        paint.beginPath();
        paint.moveTo(Math.max(gutter, from.x + from.w), from.y + from.h / 2);
        paint.lineTo(to.x, to.y + to.h / 2);
        paint.stroke();
      }
    }
    paint.setLineDash([]);
    paint.lineWidth = 1;
  }

  let due = false;
  function redraw() {
    if (due) return;
    due = true;
    requestAnimationFrame(() => { due = false; draw(); });
  }
  function resize() {
    ratio = window.devicePixelRatio || 1;
    width = Math.max(200, plot.clientWidth);
    gutter = width < 560 ? 26 : 54;
    layOut();
    shown = Math.min(height, Math.max(200, window.innerHeight));
    plot.style.height = `${height}px`;
    canvas.style.height = `${shown}px`;
    across = canvas.width = Math.round(width * ratio);
    down = canvas.height = Math.round(shown * ratio);
    image = paint.createImageData(across, down);
    pixels = new Uint32Array(image.data.buffer);
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    readColours();
    mix();
    draw();
  }

  // --- moving ---

  function show(from, to) {
    const least = 1e-7, size = Math.min(all.to - all.from, Math.max(least, to - from));
    view.from = Math.max(all.from, Math.min(from, all.to - size));
    view.to = view.from + size;
    redraw();
  }
  function zoom(factor, x = gutter + (width - gutter) / 2) {
    const at = view.from + (x - gutter) / scale();
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  }
  const pan = (pixels) => show(view.from + pixels / scale(), view.to + pixels / scale());
  const position = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top + top]; // in the whole picture, of which a part is shown
  };

  const isAlone = window.parent === window; // else the page around it scrolls, until the picture is clicked
  let isActive = isAlone;
  plot.addEventListener("focus", () => { isActive = true; });
  plot.addEventListener("blur", () => { isActive = isAlone; });
  canvas.addEventListener("wheel", (event) => {
    const [x] = position(event);
    if (x < gutter || !(isActive || event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1, aside = event.shiftKey ? event.deltaY : event.deltaX;
    if (Math.abs(aside) > Math.abs(event.deltaY) || event.shiftKey) pan(unit * aside);
    else zoom(Math.exp(Math.max(-1, Math.min(1, unit * event.deltaY / 240))), x);
  }, { passive: false });

  const fingers = new Map();
  let dragged = 0;
  canvas.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, position(event));
    dragged = 0;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = position(event), before = fingers.get(event.pointerId);
    if (before === undefined) return hover(...now);
    const [other] = [...fingers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    fingers.set(event.pointerId, now);
    if (other !== undefined) {
      const apart = Math.abs(now[0] - other[0]), was = Math.abs(before[0] - other[0]);
      if (apart > 8 && was > 8) zoom(was / apart, (now[0] + other[0]) / 2);
    } else if (fingers.size === 1) {
      dragged += Math.abs(now[0] - before[0]);
      if (dragged > 3) { tip.hidden = true; pan(before[0] - now[0]); }
    }
  });
  const lifted = (event) => {
    const was = fingers.delete(event.pointerId);
    if (was && event.type === "pointerup" && dragged <= 3) hover(...position(event));
  };
  canvas.addEventListener("pointerup", lifted);
  canvas.addEventListener("pointercancel", lifted);
  canvas.addEventListener("pointerleave", () => { if (!fingers.size) hover(-1, -1); });
  canvas.addEventListener("dblclick", (event) => {
    const k = itemAt(...position(event));
    if (k === null) return show(all.from, all.to);
    const length = Math.max(1e-6, endOf(k) - begun[k]);
    show(begun[k] - 0.2 * length, endOf(k) + 0.2 * length);
  });
  plot.addEventListener("keydown", (event) => {
    const does = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => show(all.from, all.to),
      ArrowLeft: () => pan(-80), ArrowRight: () => pan(80), Escape: () => hover(-1, -1) }[event.key];
    if (does && !event.ctrlKey && !event.metaKey) { event.preventDefault(); does(); }
  });
  for (const button of document.querySelectorAll("button"))
    button.addEventListener("click", () => {
      if (button.dataset.do === "all") show(all.from, all.to); else zoom(button.dataset.do === "in" ? 0.5 : 2);
    });

  // --- what is under the pointer ---

  function itemAt(x, y) {
    const lane = lanes.find((one) => y >= one.y && y < one.y + one.height);
    if (lane === undefined || x < gutter) return null;
    const moment = view.from + (x - gutter) / scale(), near = 3 / scale();
    let best = null, distance = near;
    for (let n = 0; n < lane.rows; n++) {
      const top = lane.body + rowAt(lane, n) * lane.rowHeight;
      if (y < top || y >= top + lane.rowHeight) continue;
      const row = lane.first + n;
      for (let k = firstAfter(row, moment - near); k < rowStarts[row + 1] && begun[k] < moment + near; k++) {
        const away = Math.max(0, begun[k] - moment, moment - endOf(k));
        if (away < distance && !isHidden[head.method[call[k]]]) { distance = away; best = k; }
      }
    }
    return best;
  }
  function cells(pairs) {
    const table = document.createElement("table");
    for (const [name, value] of pairs) {
      const line = table.insertRow();
      line.insertCell().textContent = name;
      line.insertCell().textContent = value;
    }
    return table;
  }
  function describe(k) {
    const n = call[k], lane = lanes.find((one) => k < rowStarts[one.first + one.rows]);
    const title = document.createElement("b"), below = document.createElement("span");
    title.textContent = `${head.methods[head.method[n]][1]}, ${head.request[n] ? "request" : "call"} ${head.number[n]}`;
    below.className = "soft";
    if (lane.rank < 0) {
      below.textContent = begun[k] === data.call_begun[n] ? "the controller plans, encodes and sends it"
        : "the controller joins its results";
      return [title, below, cells([["took", time(ran[k])], ["whole call", time(data.call_done[n] - data.call_begun[n])]])];
    }
    below.textContent = `${lane.group}, rank ${lane.rank}${lane.place ? `: ${lane.place}` : ""}`;
    const waitedForPlace = head.request[n] ? data.call_sent[n] - data.call_encoded[n] : 0;
    const pairs = [["at", time(begun[k])], ["ran", time(ran[k])],
      ...(waitedForPlace > 0 ? [["waited for a place", time(waitedForPlace)]] : []), ["queued", time(queued[k])],
      ["decoded", time(decoded[k])], ["encoded", time(encoded[k])], ["moved", time(moved[k])],
      ["whole call", time(data.call_done[n] - data.call_begun[n])]];
    for (const name of ["sent", "returned", "kept", "read"])
      if (data[`${name}_nbytes`][n] > 0) pairs.push([name === "read" ? "read by reference" : name, bytes(data[`${name}_nbytes`][n])]);
    const version = lane.versions.filter(([moment]) => moment <= endOf(k)).pop();
    if (version) pairs.push(["weights", `v${version[1]}`]);
    if (n in head.errors) pairs.push(["failed", head.errors[n]]);
    return [title, below, cells(pairs)];
  }
  function describeStall(x, y) {
    const moment = view.from + (x - gutter) / scale();
    const stall = head.stalls.find((one) => moment >= one.from && moment <= one.to &&
      one.lanes.some((n) => y >= lanes[n].y && y < lanes[n].y + lanes[n].height));
    if (stall === undefined) return null;
    const title = document.createElement("b"), text = document.createElement("span");
    title.textContent = "no progress";
    text.textContent = stall.text.split("\n")[0];
    return [title, text];
  }
  function hover(x, y) {
    const found = itemAt(x, y), parts = found !== null ? describe(found) : x < 0 ? null : describeStall(x, y);
    if (found !== hovered) { hovered = found; redraw(); }
    tip.hidden = parts === null;
    if (parts === null) return;
    tip.replaceChildren(...parts);
    const left = x + 14 + tip.offsetWidth > width ? Math.max(4, x - 14 - tip.offsetWidth) : x + 14;
    const below = y + 16 + tip.offsetHeight <= top + shown || y - 8 - top < tip.offsetHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${below ? y + 16 : y - 8 - tip.offsetHeight}px`;
  }

  // --- the words around it ---

  function legend() {
    const total = new Float64Array(head.methods.length);
    for (const lane of head.lanes.keys()) {
      if (head.lanes[lane].rank < 0) continue;
      const { first, rows } = lanes[lane];
      for (let k = rowStarts[first]; k < rowStarts[first + rows]; k++) total[head.method[call[k]]] += ran[k];
    }
    const entry = (colour, label, note, title) => {
      const one = document.createElement("span"), square = document.createElement("i"), text = document.createElement("b");
      square.style.background = colour;
      text.textContent = label;
      one.append(square, text);
      if (note) { const small = document.createElement("small"); small.textContent = note; one.append(small); }
      one.title = title;
      $("legend").append(one);
      return one;
    };
    const several = new Set(head.methods.map(([group]) => group)).size > 1;
    for (const n of [...head.methods.keys()].sort((a, b) => total[b] - total[a])) {
      const [group, method] = head.methods[n];
      const label = several && group.toLowerCase() !== method.split(".")[0].toLowerCase() ? `${group}: ${method}` : method;
      const one = entry(colourOf(n), label, time(total[n]), "Seconds that ranks ran it, added up. Click to hide it.");
      one.className = "method";
      one.addEventListener("click", () => {
        isHidden[n] = 1 - isHidden[n];
        one.classList.toggle("off", isHidden[n] === 1);
        redraw();
      });
    }
    entry("var(--move)", "decode, encode", "", "Arguments and values, and rows that are mapped or fetched");
    entry("var(--wait)", "waiting", "", "Calls that wait for their rank, or requests for a place; darker where more wait");
    if (head.lanes.some((lane) => lane.versions.length)) entry("var(--version)", "version of weights", "", "");
    if (head.stalls.length) entry("var(--stall)", "no progress", "", "From the last progress to the notice");
  }

  $("sentence").textContent = head.sentence;
  const nRanks = head.lanes.length - 1, nCalls = head.method.length;
  $("facts").textContent = `${nCalls.toLocaleString("en")} call${nCalls === 1 ? "" : "s"}, ${nRanks} ` +
    `rank${nRanks === 1 ? "" : "s"}, ${time(span)}`;
  canvas.setAttribute("aria-label", `Timeline of ${nCalls} calls on ${nRanks} ranks. ${head.sentence}`);
  layOut();
  legend();
  resize();
  let known = [plot.clientWidth, window.innerHeight];
  const changed = () => {
    if (known[0] === plot.clientWidth && known[1] === window.innerHeight) return;
    known = [plot.clientWidth, window.innerHeight];
    resize();
  };
  new ResizeObserver(changed).observe(plot);
  addEventListener("resize", changed);
  addEventListener("scroll", redraw, { passive: true });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", resize);
  if (isAlone) plot.focus({ preventScroll: true });
  window.timeline = { draw, show, zoom, view, all, hover }; // for tests
  document.documentElement.dataset.drawn = "yes";
})();
