/** The request of the form as a command or a program, to copy. */

/**
 * @typedef {object} Snippet
 * @property {string} origin Of the gateway.
 * @property {boolean} isChat Whether the prompt is a message of a conversation.
 * @property {Record<string, unknown>} body Of the request, without what only the page needs.
 * @property {boolean} needsToken Whether the gateway asks for a bearer token.
 */

/** Parameters that OpenAI's client has arguments for; others are passed in `extra_body`. */
const ARGUMENTS = ["model", "prompt", "messages", "max_tokens", "temperature", "top_p", "seed", "stop"];

/**
 * @param {Snippet} snippet
 * @returns {string}
 */
export function asCurl({ origin, isChat, body, needsToken }) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const token = needsToken ? " -H \"authorization: Bearer $DRAFTWIRE_TOKEN\"" : "";
  return `curl ${origin}/${pathOf(isChat)} -H 'content-type: application/json'${token} -d '${json}'\n`;
}

/**
 * @param {Snippet} snippet
 * @returns {string}
 */
export function asPython({ origin, isChat, body, needsToken }) {
  const known = Object.entries(body).filter(([name]) => ARGUMENTS.includes(name));
  const own = Object.entries(body).filter(([name]) => !ARGUMENTS.includes(name));
  const given = known.map(([name, value]) => `    ${name}=${JSON.stringify(value)},\n`).join("");
  const extra = own.length ? `    extra_body=${JSON.stringify(Object.fromEntries(own))},\n` : "";
  const key = needsToken ? 'os.environ["DRAFTWIRE_TOKEN"]' : '"none"';
  const [call, text] = isChat ? ["chat.completions", "message.content"] : ["completions", "text"];
  return `${needsToken ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key=${key})
completion = client.${call}.create(
${given}${extra})
print(completion.choices[0].${text})
`;
}

/**
 * @param {boolean} isChat
 * @returns {string} Path of the route, without the leading slash.
 */
export function pathOf(isChat) {
  return isChat ? "v1/chat/completions" : "v1/completions";
}
