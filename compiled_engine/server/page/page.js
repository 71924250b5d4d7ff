// The conversation. Whatever a model writes is text: it goes into text nodes, never into markup.

import { watch } from "./live.js";
import { ask, events, setKey } from "./server.js";

const at = (id) => document.getElementById(id);
const log = at("log");
let messages = [];
let stopping = null;

// The list of messages scrolls, or in a narrow window the page.
const scrolling = () => [log, document.scrollingElement];

function isAtEnd() {
  return scrolling().every((each) => each.scrollHeight - each.scrollTop - each.clientHeight < 40);
}

function scrollToEnd() {
  for (const each of scrolling()) each.scrollTop = each.scrollHeight;
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function addMessage(kind, title, text) {
  const article = element("article", kind);
  const body = element("pre", "text", text);
  article.append(element("h3", "", title), body);
  log.append(article);
  scrollToEnd();
  return { article, body };
}

function showError(text) {
  at("error").textContent = text;
  at("error").hidden = !text;
}

function setBusy(busy) {
  at("send").disabled = busy;
  at("stop").disabled = !busy;
}

function askForKey() {
  at("key-form").hidden = false;
  at("key").focus();
}

function refused(error) {
  if (error.name === "AbortError") return;
  if (error.status === 401) askForKey();
  showError(error.message);
}

// The images that the user has chosen or pasted, as data: URLs.
function chosenImages() {
  const read = (file) => new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
  return Promise.all([...at("images").files].map(read));
}

function contentOf(prompt, images) {
  if (!images.length) return prompt;
  return [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: prompt }];
}

function request(content, prompt) {
  const asked = { max_tokens: Number(at("max-tokens").value) || undefined, stream_options: { include_usage: true } };
  if (at("temperature").value !== "") asked.temperature = Number(at("temperature").value);
  if (at("mode").value === "completion") return ["v1/completions", { ...asked, prompt }];
  return ["v1/chat/completions", { ...asked, messages: [...messages, { role: "user", content }] }];
}

function figuresOf(usage, reason, begun, first, last) {
  const parts = [];
  const seconds = (last - first) / 1000;
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (usage?.completion_tokens > 1 && seconds > 0) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(0)} tokens/s`);
  if (first) parts.push(`first after ${(first - begun).toFixed(0)} ms`);
  if (usage?.prompt_tokens_details?.cached_tokens) parts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached`);
  parts.push({ stop: "ended by itself", length: "cut at its length", stopped: "stopped", failed: "failed" }[reason] ?? reason ?? "");
  return parts.filter(Boolean).join(" · ");
}

// The parts of an answer, put in place as they come.
class Answer {
  constructor(kind) {
    Object.assign(this, addMessage(kind, "Model", ""));
    this.text = this.body.appendChild(document.createTextNode(""));
    this.reasoning = null;
    this.article.setAttribute("aria-busy", "true");
  }

  add(choice) {
    const thought = choice.delta?.reasoning_content ?? "";
    if (thought && !this.reasoning) {
      const before = element("pre", "reasoning");
      this.reasoning = before.appendChild(document.createTextNode(""));
      this.body.before(before);
    }
    const follow = isAtEnd();
    this.reasoning?.appendData(thought);
    this.text.appendData(choice.text ?? choice.delta?.content ?? "");
    if (follow) scrollToEnd();
  }

  end(figures) {
    const follow = isAtEnd();
    this.article.removeAttribute("aria-busy");
    this.article.append(element("p", "figures", figures));
    if (follow) scrollToEnd();
  }
}

async function send(prompt) {
  const isChat = at("mode").value === "chat";
  const files = isChat ? [...at("images").files] : [];
  let content = prompt;
  stopping = new AbortController();
  setBusy(true);
  try {
    content = contentOf(prompt, isChat ? await chosenImages() : []);
  } catch (error) {
    stopping = null;
    setBusy(false);
    return refused(error);
  }
  if (isChat) at("images").value = "";
  const [path, body] = request(content, prompt);
  const kind = isChat ? "model" : "model code";
  const conversation = messages;
  showError("");
  addMessage("user", "You", [prompt, ...files.map((file) => `[${file.name}]`)].join("\n"));
  const answer = new Answer(kind);
  const begun = performance.now();
  let first = 0, last = 0, usage = null, reason = "failed";
  try {
    for await (const event of events(path, body, stopping.signal)) {
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      answer.add(choice);
      reason = choice.finish_reason ?? (reason === "failed" ? null : reason);
      if (choice.text || choice.delta?.content || choice.delta?.reasoning_content) {
        last = performance.now();
        first ||= last;
      }
    }
  } catch (error) {
    reason = error.name === "AbortError" ? "stopped" : "failed";
    refused(error);
  }
  if (isChat && answer.text.data) {
    conversation.push({ role: "user", content }, { role: "assistant", content: answer.text.data });
  }
  answer.end(figuresOf(usage, reason, begun, first, last));
  stopping = null;
  setBusy(false);
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = at("prompt").value;
  if (!prompt.trim() || stopping) return;
  at("prompt").value = "";
  send(prompt);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("prompt").addEventListener("paste", (event) => {
  const pasted = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
  if (!pasted.length || at("images-field").hidden) return;
  event.preventDefault();
  const all = new DataTransfer();
  for (const file of [...at("images").files, ...pasted]) all.items.add(file);
  at("images").files = all.files;
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stopping?.abort();
});
at("stop").addEventListener("click", () => {
  stopping?.abort();
  at("prompt").focus();
});
at("clear").addEventListener("click", () => {
  stopping?.abort();
  messages = [];
  log.replaceChildren();
  showError("");
  at("prompt").focus();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value);
  at("key").value = "";
  at("key-form").hidden = true;
  showError("");
  start();
  at("prompt").focus();
});

async function start() {
  try {
    const { data } = await (await ask("v1/models")).json();
    at("model").textContent = `${data[0].id}, up to ${data[0].max_model_len.toLocaleString("en")} tokens`;
    at("images-field").hidden = !data[0].input_modalities?.includes("image");
    watch(refused);
  } catch (error) {
    refused(error);
  }
}

start();
