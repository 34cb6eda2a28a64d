// The body of POST /v1/chat/completions, made of a chat.
//
// A chat's turn is a message of the user's with the replies of each column of models. A column has one reply, and one
// more after each round of tool results.

/**
 * Messages that a reply answers.
 *
 * @param {object} chat
 * @param {object} turn The turn that the reply is in.
 * @param {number} column The column that it is in.
 * @param {number} before Number of replies of that turn and column that stand before it.
 */
export function messagesFor(chat, turn, column, before) {
  const messages = chat.system.trim() === "" ? [] : [{ role: "system", content: chat.system }];
  for (const one of chat.turns) {
    messages.push(userMessage(one));
    if (one === turn) {
      messages.push(...(one.replies[column] ?? []).slice(0, before).flatMap(replyMessages));
      break;
    }
    // A model that was put beside another one later goes on from that one's answers.
    const replies = one.replies[column]?.length > 0 ? one.replies[column] : one.replies[0];
    messages.push(...(replies ?? []).flatMap(replyMessages));
  }
  return messages;
}

/** The body that asks a model for a streamed answer. */
export function requestBody(model, messages, fields) {
  return { model, messages, stream: true, stream_options: { include_usage: true }, ...fields };
}

function userMessage({ text, images }) {
  if (images.length === 0) return { role: "user", content: text };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  if (text !== "") parts.push({ type: "text", text });
  return { role: "user", content: parts };
}

function replyMessages({ text, thoughts, calls }) {
  if (text === "" && calls.length === 0) return [];
  const message = { role: "assistant", content: text === "" ? null : text };
  if (thoughts !== "") message.reasoning_content = thoughts;
  if (calls.length === 0) return [message];
  message.tool_calls = calls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  const results = calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result }));
  return [message, ...results];
}
