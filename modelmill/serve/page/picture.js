// Converts a file for the server: upright, not too large, as a data: URL.

const PLAIN = 9 << 20; // files up to this size are sent unchanged; base64 makes them 12 MB

function url(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("This file cannot be read."));
    reader.readAsDataURL(blob);
  });
}

// {canvas, url, width, height}; longest: pixels of the longer side.
export async function prepared(file, longest) {
  let picture;
  try {
    picture = await createImageBitmap(file, { imageOrientation: "from-image" });
  } catch {
    throw new Error("This file is not a picture that the browser can read.");
  }
  const scale = Math.min(1, longest / Math.max(picture.width, picture.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#fff"; // transparent pixels become white, as on the server
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.imageSmoothingQuality = "high";
  pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  // browsers and the server rotate JPEGs alike; for other formats only drawn pixels are sure to match
  let blob = scale === 1 && file.type === "image/jpeg" && file.size <= PLAIN ? file : null;
  if (!blob && scale === 1) blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  if (!blob || blob.size > PLAIN) blob = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.95));
  return { canvas, url: await url(blob), width: canvas.width, height: canvas.height };
}
