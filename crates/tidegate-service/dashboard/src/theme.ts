// Light and dark: as the system, unless the user has chosen one.

import {byId} from './dom.js';

const THEME = 'tidegate-theme';

function stored(): string {
  try {
    return localStorage.getItem(THEME) ?? '';
  } catch {
    return '';
  }
}

function apply(theme: string): void {
  if (theme === 'light' || theme === 'dark') document.documentElement.dataset['theme'] = theme;
  else delete document.documentElement.dataset['theme'];
}

export function setUpTheme(onChange: () => void): void {
  const choice = byId<HTMLSelectElement>('theme');
  choice.value = stored();
  apply(choice.value);
  choice.addEventListener('change', () => {
    apply(choice.value);
    try {
      if (choice.value) localStorage.setItem(THEME, choice.value);
      else localStorage.removeItem(THEME);
    } catch {
      // It then lasts for this page only.
    }
    onChange();
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', onChange);
}
