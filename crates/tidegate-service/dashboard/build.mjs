// Builds the page into dist/, or into the folder of the first argument. The output depends on the
// sources and on the versions of the lock file only.

import {readFileSync, writeFileSync, mkdirSync} from 'node:fs';
import {fileURLToPath} from 'node:url';
import {join, resolve} from 'node:path';
import {gzipSync} from 'node:zlib';
import {build} from 'esbuild';

const folder = fileURLToPath(new URL('.', import.meta.url));
const target = resolve(process.argv[2] ?? join(folder, 'dist'));
const MAX_COMPRESSED_BYTES = 150 * 1024;

const licence = readFileSync(join(folder, 'node_modules/uplot/LICENSE'), 'utf8').trim();
const {version} = JSON.parse(
  readFileSync(join(folder, 'node_modules/uplot/package.json'), 'utf8'),
);
await build({
  absWorkingDir: folder,
  entryPoints: ['src/app.ts', 'src/app.css'],
  entryNames: '[name]',
  outdir: target,
  bundle: true,
  minify: true,
  format: 'esm',
  target: ['es2022', 'chrome125', 'firefox128', 'safari17.5'],
  charset: 'utf8',
  legalComments: 'none',
  banner: {js: `/*! Contains uPlot ${version}:\n${licence}\n*/`},
  logLevel: 'warning',
});

mkdirSync(target, {recursive: true});
const page = readFileSync(join(folder, 'src/index.html'));
writeFileSync(join(target, 'index.html'), page);
const names = ['index.html', 'app.js', 'app.css'];
const sizes = names.map((name) => gzipSync(readFileSync(join(target, name)), {level: 9}).length);
const total = sizes.reduce((sum, size) => sum + size, 0);
for (const [index, name] of names.entries()) {
  console.log(`${name}: ${sizes[index]} bytes compressed`);
}
console.log(`total: ${(total / 1024).toFixed(1)} KiB compressed`);
if (total > MAX_COMPRESSED_BYTES) {
  console.error(`error: more than ${MAX_COMPRESSED_BYTES / 1024} KiB`);
  process.exit(1);
}
