//! The suggestion as one page of HTML without references, with a picture for each group.

use std::fmt::Write as _;
use std::io;

use super::{GroupSuggestion, Suggestion, above};
use crate::simulate::{paint, short, start_picture, text};
use crate::tool::table::{PageFormat, TextPage};
use crate::tool::text::{float, grouped, whole};

const HEAD: &str = "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src \
'unsafe-inline'\">\n<meta name=\"viewport\" content=\"width=device-width\">\n\
<title>tidegate suggest</title>\n<style>\n:root{color-scheme:light dark}\
body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}\
table{border-collapse:collapse}th,td{padding:.15em .8em;text-align:right;white-space:nowrap}\
th{border-bottom:1px solid}td:first-child,th:first-child{text-align:left}\
tr:nth-child(even){background:#8881}pre{background:#8882;padding:1em;overflow:auto}\
div{overflow-x:auto}svg{max-width:100%;height:auto}h2{margin-top:2em;border-top:1px solid}\n\
</style></head><body>\n<h1>From a log to a limit</h1>\n";

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 40.0;
const PLOT_WIDTH: f64 = WIDTH - LEFT - 20.0;
const PLOT_HEIGHT: f64 = HEIGHT - TOP - 48.0;
/// Points of a curve.
const POINTS: u32 = 160;
/// Colours of the windows, readable on light and dark.
const COLOURS: [&str; 5] = ["#1a7f9c", "#2da44e", "#8250df", "#bf5700", "#cf222e"];

impl Suggestion {
    /// Returns the page.
    pub(crate) fn html(&self) -> io::Result<Vec<u8>> {
        let mut html = HEAD.as_bytes().to_vec();
        let mut page = TextPage::new(&mut html, PageFormat::Html);
        self.write_with(&mut page, |group| Some(draw(group)))?;
        html.extend_from_slice(b"</body></html>\n");
        Ok(html)
    }
}

/// Draws the clients that a limit denies at least once, against the limit, for each window.
fn draw(group: &GroupSuggestion) -> String {
    let clients = float(group.clients().max(2));
    let max = group.windows.iter().map(|window| window.max).max().unwrap_or(0);
    // Powers of ten, because limits and clients differ by orders of magnitude.
    let decades = f64::from(max.max(1).ilog10() + 1);
    let x_of = |limit: f64| LEFT + PLOT_WIDTH * limit.log10() / decades;
    // Below one client is the line of none.
    let y_of = |denied: f64| {
        let part = if denied < 1.0 { 0.0 } else { 0.08 + 0.92 * denied.log(clients).min(1.0) };
        TOP + PLOT_HEIGHT * (1.0 - part)
    };
    let title = format!("{}: clients denied at least once, by limit", group.name());
    let mut svg = start_picture(WIDTH, HEIGHT, &title);
    text(&mut svg, LEFT, 18.0, "muted", &title);
    let mut exponents = 0..=max.max(1).ilog10() + 1;
    while let Some(limit) = exponents.next().map(|exponent| 10_f64.powi(exponent.cast_signed())) {
        let x = x_of(limit);
        line(&mut svg, "grid", [x, TOP, x, TOP + PLOT_HEIGHT]);
        let label = grouped(whole(limit));
        text(&mut svg, x, TOP + PLOT_HEIGHT + 16.0, "muted middle", &label);
    }
    for denied in [0.0, 1.0, clients / 100.0, clients / 10.0, clients] {
        let (y, count) = (y_of(denied), whole(denied.round()));
        if denied > 1.0 && y_of(1.0) - y < 14.0 {
            continue;
        }
        line(&mut svg, "grid", [LEFT, y, LEFT + PLOT_WIDTH, y]);
        text(&mut svg, LEFT - 6.0, y + 4.0, "muted end", &grouped(count));
    }
    for (number, (window, colour)) in group.windows.iter().zip(COLOURS).enumerate() {
        let mut points = String::new();
        for step in 0..=POINTS {
            let limit = 10_f64.powf(decades * f64::from(step) / f64::from(POINTS));
            let denied = above(&window.peaks, whole(limit));
            let _ = write!(points, "{},{} ", short(x_of(limit)), short(y_of(float(denied))));
        }
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            points.trim_end()
        );
        let (x, y) = (LEFT + float(number as u64) * 110.0, HEIGHT - 10.0);
        let _ = writeln!(
            svg,
            "<rect x=\"{}\" y=\"{}\" width=\"10\" height=\"10\" fill=\"{colour}\"/>",
            short(x),
            short(y - 9.0)
        );
        text(&mut svg, x + 15.0, y, "muted", &format!("per {}", window.window));
    }
    let (x, caption) = (x_of(float(group.policy.limit)), format!("limit {}", group.policy.limit));
    line(&mut svg, "limit", [x, TOP - 4.0, x, TOP + PLOT_HEIGHT]);
    text(&mut svg, x, TOP - 8.0, "limit-text middle", &caption);
    svg.push_str("</svg>\n");
    svg
}

fn line(svg: &mut String, class: &str, [x1, y1, x2, y2]: [f64; 4]) {
    let [x1, y1, x2, y2] = [x1, y1, x2, y2].map(short);
    let class = paint(class);
    // Writing to a string never fails.
    let _ = writeln!(svg, "<path {class} fill=\"none\" d=\"M{x1} {y1}L{x2} {y2}\"/>");
}
