/**
 * Opens the console as the manager: stores the manager's token in this tab's storage, where the
 * console looks for it. When the token has expired, or the demo was restarted, the console opens this
 * page again.
 */

import { tokenOf } from "./tokens.js";

sessionStorage.setItem("headwater.token", await tokenOf("manager"));
sessionStorage.setItem("headwater.token_page", location.pathname);
location.replace(`/console/${location.hash}`);
