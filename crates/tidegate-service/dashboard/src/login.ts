// Login: asks for the admin token where the server has one.

import * as api from './api.js';
import {byId, setText, show} from './dom.js';

export class Login {
  private readonly section = byId('login');
  private readonly token = byId<HTMLInputElement>('token');
  private readonly error = byId('login-error');
  private readonly logOut = byId<HTMLButtonElement>('log-out');

  constructor(onLogin: () => void) {
    byId<HTMLFormElement>('login-form').addEventListener('submit', (event) => {
      event.preventDefault();
      const value = this.token.value.trim();
      // A header can have no other characters.
      if (!/^[\x21-\x7e]+$/.test(value)) {
        setText(this.error, 'A token has only visible ASCII characters, and no spaces.');
        return;
      }
      setText(this.error, '');
      api.setToken(value);
      this.token.value = '';
      this.hide();
      onLogin();
    });
    this.logOut.addEventListener('click', () => {
      api.forgetToken();
      // Nothing of the server stays, neither in the page nor in its address.
      history.replaceState(null, '', location.pathname);
      location.reload();
    });
    show(this.logOut, api.hasToken());
  }

  /** Shows the form. */
  ask(error: string): void {
    show(this.logOut, false);
    show(this.section, true);
    setText(this.error, error);
    this.token.focus();
  }

  private hide(): void {
    show(this.section, false);
    show(this.logOut, true);
  }
}
