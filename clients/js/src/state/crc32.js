/** CRC-32 as zlib computes it, of a text in UTF-8. */

const TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

const encoder = new TextEncoder();

/** Continue a checksum with a text. @param {string} text @param {number} [checksum] */
export function crc32(text, checksum = 0) {
  let value = ~checksum;
  for (const byte of encoder.encode(text)) value = TABLE[(value ^ byte) & 255] ^ (value >>> 8);
  return ~value >>> 0;
}
