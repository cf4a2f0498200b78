/**
 * On to the console, as the manager: it looks for its token in this tab's storage. When that has
 * ended, or the demo was started anew, it comes here again.
 */

import { tokenOf } from "./people.js";

sessionStorage.setItem("headwater.token", await tokenOf("manager"));
sessionStorage.setItem("headwater.token_page", location.pathname);
location.replace(`/console/${location.hash}`);
