least => {
  // The texts of a page that cannot be read well: those whose contrast is less than `least`.
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = colour => {  // the browser itself reads the colour, in whatever way it is written
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const light = c => c.slice(0, 3).map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const under = element => {
    const chain = []; for (let e = element; e; e = e.parentElement) chain.unshift(rgba(getComputedStyle(e).backgroundColor));
    return chain.reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, style = getComputedStyle(element);
    if (!walker.currentNode.data.trim() || !element.getClientRects().length || style.visibility !== 'visible') continue;
    if (['SCRIPT', 'STYLE', 'OPTION'].includes(element.tagName) || element.closest('#popup')) continue;
    const below = under(element.closest('svg') ? element.closest('svg').parentElement : element);
    const ink = over(rgba(element.closest('svg') ? style.fill : style.color), below);
    const [a, b] = [light(ink), light(below)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < least) found.push(`${ratio.toFixed(2)} ${element.tagName}.${element.className.baseVal ?? element.className}: ${walker.currentNode.data.trim().slice(0, 40)}`);
  }
  return found;
}
