// The chat box: a conversation over the server's own API, and what each turn took from the cache.

import { $, element } from "./dom.js";
import { events } from "./events.js";

export function startChat() {
  let messages = [];
  let running = null;

  async function say(text) {
    messages.push({ role: "user", content: text });
    const thought = element("div", { class: "thought", hidden: true });
    const answer = element("div", { class: "answer" });
    const usage = element("div", { class: "usage" });
    const turn = element("li", { class: "turn" }, thought, answer, usage);
    $("turns").append(element("li", {}, element("div", { class: "said" }, text)), turn);
    running = new AbortController();
    busy(true);
    const started = performance.now();
    let first = null, told = null;
    try {
      const stream = events("v1/chat/completions", {
        method: "POST", signal: running.signal, headers: { "content-type": "application/json" },
        body: JSON.stringify({
          messages, stream: true, stream_options: { include_usage: true }, max_completion_tokens: Number($("most").value),
          chat_template_kwargs: { enable_thinking: $("thinking").checked },
        }),
      });
      for await (const chunk of stream) {
        if (chunk.error) throw new Error(chunk.error.message);
        if (chunk.usage) told = chunk.usage;
        const delta = chunk.choices[0]?.delta ?? {};
        if (first === null && (delta.content || delta.reasoning_content)) first = performance.now() - started;
        if (delta.reasoning_content) {
          thought.hidden = false;
          thought.append(delta.reasoning_content);
        }
        if (delta.content) answer.append(delta.content);
        $("turns").scrollTop = $("turns").scrollHeight;
      }
    } catch (error) {
      if (error.name !== "AbortError") usage.replaceChildren(element("span", { class: "wrong" }, error.message));
    }
    messages.push({ role: "assistant", content: answer.textContent });
    if (told) showUsage(turn, usage, told, first);
    running = null;
    busy(false);
  }

  function showUsage(turn, place, told, first) {
    const cached = told.prompt_tokens_details.cached_tokens;
    turn.dataset.prompt = told.prompt_tokens;
    turn.dataset.cached = cached;
    const share = (100 * cached) / told.prompt_tokens;
    place.replaceChildren(
      element("div", { class: "strip", title: "share of the prompt that came from the cache" },
        element("i", { class: "cached", style: { width: `${share}%` } }),
        element("i", { class: "computed", style: { width: `${100 - share}%` } })),
      element("span", {}, element("b", {}, `${cached} cached`), ` of ${told.prompt_tokens} prompt tokens`),
      element("span", {}, `${told.completion_tokens} generated`),
      element("span", {}, first === null ? "" : `first after ${Math.round(first)} ms`));
    $("turns").scrollTop = $("turns").scrollHeight;
  }

  function busy(is) {
    $("send").disabled = is;
    $("stop").hidden = !is;
    if (!is) $("chat-text").focus({ preventScroll: true });
  }

  $("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("chat-text").value.trim();
    if (!text || running) return;
    $("chat-text").value = "";
    say(text);
  });
  $("chat-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("chat").requestSubmit();
    }
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("anew").addEventListener("click", () => {
    running?.abort();
    messages = [];
    $("turns").replaceChildren();
  });
}
