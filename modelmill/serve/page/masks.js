// Masks as pixels: decodes COCO's run lengths, draws, cuts out.

// Column-major, background first; five bits per character; after the first runs each is stored as a difference.
export function pixels({ size: [height, width], counts }) {
  const mask = new Uint8Array(width * height);
  const runs = [0, 0];
  let at = 0;
  let value = 0;
  let shift = 0;
  let inside = 0;
  let told = 0;
  for (let i = 0; i < counts.length; i++) {
    const bits = counts.charCodeAt(i) - 48;
    value |= (bits & 31) << shift;
    shift += 5;
    if (bits & 32) continue;
    if (bits & 16 && shift < 32) value |= -1 << shift;
    const run = told > 2 ? value + runs[0] : value;
    if (inside) for (let end = at + run; at < end; at++) mask[(at % height) * width + Math.floor(at / height)] = 1;
    else at += run;
    runs[0] = runs[1];
    runs[1] = run;
    told++;
    inside ^= 1;
    value = shift = 0;
  }
  return mask;
}

export function colour(index) {
  const hue = (165 + index * 222.5) % 360;
  const part = (n) => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (0.55 - 0.42 * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return [part(0), part(8), part(4)];
}

// Paint masks, the large ones first; the border is opaque, the inside is translucent.
export function paint(canvas, masks, chosen = -1) {
  const { width, height } = canvas;
  const picture = new ImageData(width, height);
  const { data } = picture;
  const rim = Math.max(1, Math.round(Math.max(width, height) / 700));
  const order = masks.map((_, i) => i).sort((a, b) => masks[b].area - masks[a].area);
  for (const i of order) {
    const [red, green, blue] = colour(i);
    const { mask, box: [x0, y0, x1, y1] } = masks[i];
    const faint = chosen >= 0 && chosen !== i;
    for (let y = y0; y <= y1; y++) {
      for (let x = x0; x <= x1; x++) {
        const p = y * width + x;
        if (!mask[p]) continue;
        const edge = x < rim || y < rim || x >= width - rim || y >= height - rim
          || !mask[p - rim] || !mask[p + rim] || !mask[p - rim * width] || !mask[p + rim * width];
        const firm = edge && !faint;
        data.set(firm ? [red * 0.7, green * 0.7, blue * 0.7, 255] : [red, green, blue, faint ? 45 : 120], 4 * p);
      }
    }
  }
  canvas.getContext("2d").putImageData(picture, 0, 0);
}

// The canvas to download. kind: cutout, mask or overlay.
export function composed(photo, masks, chosen, kind) {
  const { width, height } = photo;
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const pen = canvas.getContext("2d");
  if (kind === "overlay") {
    const over = document.createElement("canvas");
    over.width = width;
    over.height = height;
    paint(over, masks, -1);
    pen.drawImage(photo, 0, 0);
    pen.drawImage(over, 0, 0);
    return canvas;
  }
  const shown = chosen >= 0 ? [masks[chosen]] : masks;
  const source = photo.getContext("2d").getImageData(0, 0, width, height);
  for (let p = 0; p < width * height; p++) {
    const inside = shown.some(({ mask }) => mask[p]);
    if (kind === "mask") source.data.fill(inside ? 255 : 0, 4 * p, 4 * p + 3);
    else source.data[4 * p + 3] = inside ? 255 : 0;
  }
  pen.putImageData(source, 0, 0);
  return canvas;
}
