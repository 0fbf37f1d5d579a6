document.body.textContent = "Tidegate";
