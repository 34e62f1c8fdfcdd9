(() => {
  "use strict";
  const $ = (id) => document.getElementById("tv-" + id);
  const readers = JSON.parse($("data").textContent);
  const CONTEXTS = {
    own_skill: "own skill", other_skill: "another episode’s skill", unrelated: "unrelated text",
    shuffled: "own skill, words shuffled", none: "no text", floor: "the same context, read again",
  };
  const MARKS = { think: "plain", action: "bold, underlined", format: "italic, dotted" };
  const state = { reader: 0, episode: 0, context: 0, quantity: "gap", layer: 0, focused: 0, hovered: null };
  let spans = [];

  const reader = () => readers[state.reader];
  const episode = () => reader().episodes[state.episode];
  const context = () => episode().contexts[state.context];
  const label = (name) => CONTEXTS[name] || name;
  const known = (value) => value !== null && value !== undefined;
  const number = (value, signed) =>
    !known(value) ? "–" : (signed && value > 0 ? "+" : "") + String(Number(value.toPrecision(4))).replace("-", "−");

  function make(tag, text, name) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    return element;
  }

  function options(select, labels, chosen) {
    select.replaceChildren(...labels.map(([value, text]) => {
      const option = make("option", text);
      option.value = value;
      return option;
    }));
    select.value = String(chosen);
    select.parentElement.hidden = labels.length < 2;
  }

  const quantities = () => [
    ["gap", "gap: teacher − student"],
    ...(reader().layers ? [["hidden", "hidden change, chosen layer"]] : []),
    ...reader().methods.map((name, k) => ["weight " + k, "weight of " + name]),
  ];

  // What colours token i, and the ends of its scale; the scale is the same for all contexts and episodes of a reader.
  function coloured() {
    const { scales } = reader();
    if (state.quantity === "gap") return { of: (i) => context().gap[i], scale: scales.gap, unit: "nats" };
    if (state.quantity === "hidden")
      return { of: (i) => context().hidden[i][state.layer], scale: [0, scales.hidden[state.layer]], unit: "1 − cos" };
    const k = Number(state.quantity.split(" ")[1]);
    return { of: (i) => context().weight[k][i], scale: scales.weight[k], unit: "weight" };
  }

  function colour(value, high) {
    const share = Math.min(1, Math.abs(value) / high);
    return `rgb(var(${value < 0 ? "--minus" : "--plus"}) / calc(var(--deep) * ${share.toFixed(3)}))`;
  }

  const visible = (text) => (text === "" ? "·" : text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥"));

  function drawTokens() {
    const shown = episode();
    spans = [];
    const turns = [];
    shown.text.forEach((text, i) => {
      if (i === 0 || shown.turn[i] !== shown.turn[i - 1] || shown.segment[i] !== shown.segment[i - 1]) {
        const turn = make("div", undefined, "turn");
        turn.setAttribute("role", "group");
        turn.setAttribute("aria-label", "turn " + (shown.turn[i] + 1));
        turn.append(make("h4", "turn " + (shown.turn[i] + 1)));
        turns.push(turn);
      }
      const span = make("span", visible(text), "token " + shown.class[i]);
      span.tabIndex = -1;
      span.dataset.i = i;
      span.setAttribute("role", "option");
      turns[turns.length - 1].append(span);
      spans.push(span);
    });
    $("tokens").replaceChildren(...turns);
    state.focused = 0;
    state.hovered = null;
    if (spans.length) spans[0].tabIndex = 0;
  }

  function paint() {
    const { of, scale, unit } = coloured();
    spans.forEach((span, i) => {
      const value = of(i);
      span.style.backgroundColor = known(value) ? colour(value, scale[1]) : "";
      span.classList.toggle("unread", !known(context().gap[i]));
    });
    const [low, high] = scale;
    const box = make("div", undefined, "scale");
    const bar = make("div", undefined, "bar");
    bar.style.background = "linear-gradient(to right, " + [low, (low + high) / 2, high].map((v) => colour(v, high)) + ")";
    const ends = make("div", undefined, "ends");
    ends.append(make("span", low < 0 ? "≤ " + number(low) : "0"), ...(low < 0 ? [make("span", "0")] : []), make("span", "≥ " + number(high)));
    const named = quantities().find(([value]) => value === state.quantity)[1];
    box.append(make("div", `${named} (${unit})${state.quantity === "gap" ? "; above 0: likelier with the text" : ""}`), bar, ends);
    const marks = make("div");
    Object.entries(MARKS).forEach(([name, how], k) => {
      marks.append(k ? " · " : "", make("span", name, name), ": " + how);
    });
    $("legend").replaceChildren(box, marks);
    $("layer-shown").textContent = reader().layers ? `${state.layer} of 0–${reader().layers - 1}` : "";
  }

  function tell() {
    const shown = episode();
    const at = context();
    const wins = known(shown.success) ? (shown.success ? " Won." : " Not won.") : "";
    const gaps = at.gap.filter(known);
    const mean = gaps.length ? gaps.reduce((a, b) => a + b, 0) / gaps.length : null;
    $("task").textContent =
      `Task: ${(shown.description || shown.task).replace(/[.\s]+$/, "")}.${wins} ${shown.text.length} tokens; mean gap ` +
      `with ${label(at.name)} ${known(mean) ? number(Number(mean.toPrecision(3)), true) : "–"} nats.`;
    $("skill-title").textContent = "What stood in the context: " + label(at.name);
    $("skill").textContent = at.skill || "(nothing)";
  }

  function row(name, value, meter) {
    const line = make("tr");
    const head = make("th", name);
    head.scope = "row";
    line.append(head, make("td", value));
    if (meter !== undefined) {
      const cell = make("td", undefined, "meter");
      const bar = make("i", undefined, meter < 0 ? "below" : "");
      bar.style.width = Math.min(100, 100 * Math.abs(meter)) + "%";
      cell.append(bar);
      line.append(cell);
    }
    return line;
  }

  function bars(values) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const high = Math.max(...values.filter(known), 0);
    svg.setAttribute("viewBox", `0 0 ${values.length} 1`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `hidden change by layer, largest ${number(high)} at layer ${values.indexOf(high)}`);
    values.forEach((value, layer) => {
      const height = high > 0 ? Math.max(0, value) / high : 0;
      const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      for (const [name, v] of [["x", layer + 0.1], ["y", 1 - height], ["width", 0.8], ["height", height]])
        bar.setAttribute(name, v);
      if (layer === state.layer) bar.setAttribute("class", "chosen");
      svg.append(bar);
    });
    const axis = make("div", undefined, "axis");
    axis.append(make("span", "layer 0"), make("span", `highest bar ${number(high)}`), make("span", String(values.length - 1)));
    return [svg, axis];
  }

  function details() {
    const i = state.hovered ?? state.focused;
    const shown = episode();
    const at = context();
    spans.forEach((span, k) => {
      span.classList.toggle("shown", k === i);
      span.setAttribute("aria-selected", k === i);
    });
    if (!spans.length) return $("panel").replaceChildren(make("p", "This episode has no tokens."));
    const table = make("table");
    const layer = at.hidden[i][state.layer];
    table.append(
      row("gap", number(at.gap[i], true) + " nats"),
      row("student log-prob", number(at.student[i])),
      row("teacher log-prob", number(at.teacher[i])),
      ...(reader().layers ? [row(`hidden change, layer ${state.layer}`, number(layer))] : []),
    );
    const parts = [
      make("p", visible(shown.text[i]), "said"),
      make("p", `${shown.class[i]}, turn ${shown.turn[i] + 1}, token ${i + 1} of ${spans.length}; ${label(at.name)}`, "quiet"),
    ];
    if (!known(at.gap[i])) parts.push(make("p", "This token was not read in this context."));
    else {
      parts.push(table);
      if (at.hidden[i].length) parts.push(...bars(at.hidden[i]));
      if (reader().methods.length) {
        parts.push(make("p", "weight by method", "quiet"));
        const weights = make("table");
        reader().methods.forEach((name, k) => {
          const value = at.weight[k][i];
          weights.append(row(name, number(value), known(value) ? value / reader().scales.weight[k][1] : 0));
        });
        parts.push(weights);
      }
    }
    $("panel").replaceChildren(...parts);
  }

  function refresh(level) {
    if (level === "reader") {
      options($("episode"), reader().episodes.map((e, k) => [k, `${k + 1}: ${e.description || e.task}`]), state.episode = 0);
      if (!quantities().some(([value]) => value === state.quantity)) state.quantity = "gap";
      options($("quantity"), quantities(), state.quantity);
      state.layer = Math.min(state.layer, Math.max(0, reader().layers - 1));
      $("layer").max = Math.max(0, reader().layers - 1);
      $("layer").value = state.layer;
      $("layer-label").hidden = !reader().layers;
    }
    if (level === "reader" || level === "episode") {
      const names = episode().contexts.map((c) => c.name);
      const before = state.name || "own_skill";
      state.context = Math.max(0, names.indexOf(before));
      options($("context"), names.map((name, k) => [k, label(name)]), state.context);
      drawTokens();
    }
    paint();
    tell();
    details();
  }

  function focus(i) {
    if (i < 0 || i >= spans.length) return;
    spans[state.focused].tabIndex = -1;
    state.focused = i;
    spans[i].tabIndex = 0;
    details();
  }

  const chosen = (event) => {
    const token = event.target.closest(".token");
    return token ? Number(token.dataset.i) : null;
  };
  const tokens = $("tokens");
  tokens.addEventListener("mouseover", (event) => {
    state.hovered = chosen(event) ?? state.hovered;
    details();
  });
  tokens.addEventListener("mouseleave", () => { state.hovered = null; details(); });
  tokens.addEventListener("focusin", (event) => { const i = chosen(event); if (i !== null) focus(i); });
  tokens.addEventListener("keydown", (event) => {
    const to = {
      ArrowRight: state.focused + 1, ArrowLeft: state.focused - 1, Home: 0, End: spans.length - 1,
      ArrowDown: nextTurn(1), ArrowUp: nextTurn(-1),
    }[event.key];
    if (to === undefined || to < 0 || to >= spans.length) return;
    event.preventDefault();
    state.hovered = null;
    spans[to].focus();
  });

  // The first token of the turn before or after the focused one.
  function nextTurn(step) {
    const starts = spans.flatMap((span, i) => (i === 0 || span.parentElement !== spans[i - 1].parentElement ? [i] : []));
    const own = starts.filter((i) => i <= state.focused).length - 1;
    return starts[own + step] ?? -1;
  }

  $("reader").addEventListener("change", (event) => { state.reader = Number(event.target.value); refresh("reader"); });
  $("episode").addEventListener("change", (event) => { state.episode = Number(event.target.value); refresh("episode"); });
  $("context").addEventListener("change", (event) => {
    state.context = Number(event.target.value);
    state.name = context().name;
    refresh();
  });
  $("quantity").addEventListener("change", (event) => { state.quantity = event.target.value; refresh(); });
  $("layer").addEventListener("input", (event) => { state.layer = Number(event.target.value); refresh(); });
  options($("reader"), readers.map((r, k) => [k, r.reader]), 0);
  state.layer = Math.floor(reader().layers / 2);
  refresh("reader");
})();
