<?php
// Application that answers with what PHP read from the request; a router of `php -S`.
$authorization = $_SERVER['HTTP_AUTHORIZATION'] ?? '';
$text = fn($value) => is_string($value) ? $value : null;
header('Content-Type: application/json');
echo json_encode([
    'route' => parse_url($_SERVER['REQUEST_URI'], PHP_URL_PATH) === '/limited/x' ? 'limited' : 'other',
    'cookie' => $text($_COOKIE['session_id'] ?? null),
    'header' => $text($_SERVER['HTTP_X_USER_ID'] ?? null),
    'query' => $text($_GET['api_key'] ?? null),
    'token' => preg_match('/^Bearer\s+(.+)$/i', $authorization, $found) ? trim($found[1]) : null,
    'basic' => isset($_SERVER['PHP_AUTH_USER'], $_SERVER['PHP_AUTH_PW'])
        ? $_SERVER['PHP_AUTH_USER'] . ':' . $_SERVER['PHP_AUTH_PW'] : null,
], JSON_INVALID_UTF8_SUBSTITUTE);
