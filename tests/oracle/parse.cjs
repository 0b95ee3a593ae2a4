// Parses Oracle units with the grammar of antlr4ts-sql. In: a JSON list of texts on stdin. Out: a JSON list of lists of errors.
// argv[2] is the node_modules folder with antlr4ts-sql@1.1.0 and antlr4ts@0.5.0-alpha.4 (its later 0.5.0-dev crashes).
const path = require("path");
const { antlr4tsSQL, SQLDialect } = require(path.join(path.resolve(process.argv[2]), "antlr4ts-sql"));

const parse = (text) => {
  const errors = [];
  const listener = {
    syntaxError: (_recognizer, _symbol, line, column, message) => errors.push(`${line}:${column} ${message}`),
  };
  const grammar = new antlr4tsSQL(SQLDialect.PLSQL);
  const parser = grammar.getParser(grammar.getTokens(text, [listener]), [listener]);
  grammar.getParseTree(parser);
  return errors;
};

let given = "";
process.stdin.on("data", (chunk) => (given += chunk));
process.stdin.on("end", () => process.stdout.write(JSON.stringify(JSON.parse(given).map(parse))));
